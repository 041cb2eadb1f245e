"""Small tensors run fastest on one thread; tests of real models take more (the `real_threads` fixture)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def real_threads() -> Iterator[None]:
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)

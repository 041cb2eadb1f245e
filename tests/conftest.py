"""Small tensors run fastest on one thread; tests of real models take more (the `real_threads` fixture)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
# A shell that runs the tests in the background has SIGINT ignored, and processes started here would inherit that: the
# tests of Ctrl-C would then wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def real_threads() -> Iterator[None]:
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)

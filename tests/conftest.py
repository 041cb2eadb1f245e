"""Small tensors run fastest on one thread; tests of real models take more (the `real_threads` fixture)."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from paceline.checkpoints.resolve import cache_folder

torch.set_num_threads(1)
# A shell that runs the tests in the background has SIGINT ignored, and processes started here would inherit that: the
# tests of Ctrl-C would then wait for nothing.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_profiles_in_the_users_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Models that were fetched are used where they lie; what is measured of the tests' own models is thrown away."""
    real, ours = cache_folder(), tmp_path_factory.mktemp("cache")
    for name in ("smollm2-135m", "tests"):
        (real / name).mkdir(parents=True, exist_ok=True)
        (ours / name).symlink_to(real / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(ours))
        yield


@pytest.fixture
def real_threads() -> Iterator[None]:
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)

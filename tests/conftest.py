"""Set-up of every test: one thread, no network, and a cache folder apart from the user's."""

import os
from collections.abc import Iterator

import pytest

# Set before importing torch, and inherited by programs of tests. Threads waiting for each other at
# such small matrices cost a hundredfold while another program uses the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from hypothesis import settings
from support.tiny import Zoo

from offload_rt.ops import linear

# A busy machine is no failure, and every run tries the same examples.
settings.register_profile("offload_rt", deadline=None, derandomize=True)
settings.load_profile("offload_rt")


@pytest.fixture(autouse=True, scope="session")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements are written to a folder of this run, and nothing asks the hub."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        # Which product is faster is measured, and a busy machine measures anything.
        patch.setattr(linear, "prefers_torch", lambda dtype: False)
        yield


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Numbers that a test draws without a generator do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny checkpoints of every family, made when they are first asked for."""
    return Zoo(tmp_path_factory.mktemp("zoo"))

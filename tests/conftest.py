"""Set-up of every test: one thread, and the fixtures of `tests/support/fixtures.py`."""

import importlib
import os
from pathlib import Path

import pytest

# Set before importing torch, and inherited by programs of tests. Threads waiting for each other at
# such small matrices cost a hundredfold while another program uses the cores.
os.environ["OMP_NUM_THREADS"] = "1"
# Programs of tests have separate caches, but compile the functions of numba once.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "numba"))


def pytest_configure(config: pytest.Config) -> None:
    """Register the fixtures, except in the controller of xdist.

    The controller runs no test. Its imports of torch and transformers would delay the workers.
    """
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.register(importlib.import_module("support.fixtures"))

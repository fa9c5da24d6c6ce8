"""Fixtures for tests of benchmarks."""

import runpy

import pytest

from bench.common import checkpoints
from bench.common.measure import ROOT
from bench.compute import products


@pytest.fixture
def scripts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the scripts of benchmarks in this process, where torch is loaded."""

    def run(script: str, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", [script, *arguments])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            assert not end.code

    monkeypatch.setattr(checkpoints, "run_python", run)
    monkeypatch.setattr(products, "run_python", run)

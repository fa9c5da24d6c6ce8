"""Products of bench.compute: matrices have the measured format, and ratios compare equal work."""

import runpy

import pytest
import torch

from bench.common import checkpoints
from bench.common.measure import ROOT
from bench.compute import products


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a few kilobytes, one copy of them; scripts run in this process."""

    def run(script: str, *arguments: str) -> None:
        monkeypatch.setattr("sys.argv", [script, *arguments])
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except SystemExit as end:
            assert not end.code

    for module in (checkpoints, products):
        monkeypatch.setattr(module, "run_python", run)
    shapes = {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    monkeypatch.setattr(products, "HIDDEN", 256)
    monkeypatch.setattr(products, "INTERMEDIATE", 512)
    monkeypatch.setattr(products, "MATRICES", shapes)
    monkeypatch.setattr(products, "_TIMES_CACHE", 0)


@pytest.mark.usefixtures("small")
def test_all_formats_multiply_the_same_weights(tmp_path):
    """Products of every format differ from float32 by rounding."""
    by_format = products.all_weights(tmp_path, [*products.DENSE, "int4, groups of 128", "int8"])
    for name, (_, n_in) in products.MATRICES.items():
        x = torch.randn(3, n_in, generator=torch.Generator().manual_seed(1))
        expected = by_format["float32"].views[0].linear(x, name)
        for kind, weights in by_format.items():
            y = weights.views[0].linear(x.to(weights.dtype), name).float()
            error = (y - expected).norm() / expected.norm()
            assert error < (0.2 if kind in products.FOUR_BITS else 0.02), (kind, name)
            assert kind == "float32" or error > 0
    n = 3 * 256 * 512
    assert by_format["bf16"].nbytes == 2 * n and by_format["int8"].nbytes == n + 2 * 1280


@pytest.mark.usefixtures("small")
def test_random_blocks_have_the_sizes_of_the_type(tmp_path):
    for name, size in (("Q4_0", 3 * 256 * 512 // 32 * 18), ("IQ3_S", 3 * 512 * 110)):
        weights = products.random_blocks(name)
        assert weights.nbytes == size and len(weights.views) == 1
        for matrix, (n_out, n_in) in products.MATRICES.items():
            y = weights.views[0].linear(torch.ones(2, n_in, dtype=weights.dtype), matrix)
            assert y.shape == (2, n_out) and y.isfinite().all()

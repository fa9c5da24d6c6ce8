"""Products of bench.compute: matrices have the measured format, and ratios compare equal work."""

import pytest
import torch

from bench.compute import products


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of a few kilobytes, one copy of them."""
    shapes = {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    monkeypatch.setattr(products, "HIDDEN", 256)
    monkeypatch.setattr(products, "INTERMEDIATE", 512)
    monkeypatch.setattr(products, "MATRICES", shapes)
    monkeypatch.setattr(products, "_TIMES_CACHE", 0)


@pytest.mark.usefixtures("small", "scripts_here")
def test_all_formats_multiply_the_same_weights(tmp_path):
    """Products of every format differ from float32 by rounding."""
    by_format = products.all_weights(tmp_path, [*products.DENSE, "int4, groups of 128", "Q4_0"])
    for name, (_, n_in) in products.MATRICES.items():
        x = torch.randn(3, n_in, generator=torch.Generator().manual_seed(1))
        expected = by_format["float32"].views[0].linear(x, name)
        for kind, weights in by_format.items():
            y = weights.views[0].linear(x.to(weights.dtype), name).float()
            error = (y - expected).norm() / expected.norm()
            assert error < (0.2 if kind in products.FOUR_BITS else 0.02), (kind, name)
            assert kind == "float32" or error > 0
    n = 3 * 256 * 512
    assert by_format["bf16"].nbytes == 2 * n and by_format["Q4_0"].nbytes == n // 32 * 18

"""Unquantised weights, in any compute dtype."""

from offload_rt.weights.formats import WeightFormat


def matches(quantization_config: object) -> bool:
    """Match configs without quantization."""
    return quantization_config is None


class Format(WeightFormat):
    """Every tensor is stored unchanged."""

    name = "dense"

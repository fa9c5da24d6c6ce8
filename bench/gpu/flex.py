"""How fast is tree attention compared with torch's FlexAttention, which takes long to compile?"""

from collections.abc import Iterator

from bench.gpu import attention

EXPECTED_S = 90
_SHAPES = attention.Shapes(n_nodes=(768, 256), has_flex=True)


def measure() -> Iterator[dict[str, object]]:
    """Seconds of both and of the works of `attention`, by tree size."""
    yield from attention.measure(_SHAPES)

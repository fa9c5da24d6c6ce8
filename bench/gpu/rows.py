"""Llama2-70B's shape on a card of 24 GB: passes at further sizes of the tree, after `streamed`."""

from collections.abc import Iterator

from bench.gpu import streamed

EXPECTED_S = 150
_SHAPES = streamed.Shapes(n_nodes=(64, 256, 512, 1024, 2048))


def measure() -> Iterator[dict[str, object]]:
    """Pass times at every size, each with the rate of the link measured just before."""
    yield from streamed.measure(_SHAPES)

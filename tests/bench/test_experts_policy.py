"""Replay of router choices: times of the virtual clock."""

import random
from collections import Counter

import pytest

from bench.experts.policy import Link, Replayed
from offload_rt.models.architecture import Mixture
from offload_rt.offload.placement import ExpertSizes


@pytest.mark.parametrize("latency", [0.0, 0.5, 2.0])
def test_requests_take_a_latency_unless_they_continue_the_previous(latency):
    """Slots for all experts: each is requested once, those of a layer in file order."""
    sizes = ExpertSizes(Mixture((0, 1), 8, 3), 1)
    cache = Replayed(sizes, sizes.n_blocks, Link(latency))
    draw = random.Random(0)
    seconds = 0.0
    last = -1
    seen = set()
    for layer in [0, 1] * 20:
        experts = draw.sample(range(8), 3)
        arrived = [expert for expert, _ in cache.arrive(layer, Counter(experts))]
        assert sorted(arrived) == sorted(experts)
        for block in sorted({8 * layer + expert for expert in experts} - seen):
            seconds += 1 + latency * (block != last + 1)
            last = block
            seen.add(block)
        assert cache.now == pytest.approx(seconds)
    assert len(seen) == sizes.n_blocks

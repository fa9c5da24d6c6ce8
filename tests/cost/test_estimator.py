"""Cost estimates learn from measured passes and draft levels."""

import numpy as np
import pytest

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import ComputeTimes, MachineProfile, PassBytes


def test_draft_level_costs_its_bytes_until_measured():
    profile = MachineProfile((), memory_gbps=500.0)
    cost = CostEstimator(profile, PassBytes((), 10**9), draft_nbytes=13 * 10**9)
    assert cost.level_s == pytest.approx(0.026)
    cost.drafted(4, 4 * 0.05)
    assert 0.026 < cost.level_s < 0.05


def test_first_pass_decides_where_nothing_was_measured():
    """Measured compute times count as a pass."""
    compute = ComputeTimes((1, 2), (0, 1), ((1.0, 1.0), (1.0, 1.0)))
    for times, expected in ((None, 3.0), (compute, 2.0)):
        cost = CostEstimator(MachineProfile((), 1.0, 0.0, times), PassBytes((), 10**9))
        cost.passed(1, 0, 0.0, 3.0, 0.0)
        assert cost.seconds(np.array([1]), 0)[0] == pytest.approx(expected)

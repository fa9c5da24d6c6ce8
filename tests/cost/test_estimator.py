"""Cost estimates learn from measured passes and draft levels."""

import pytest

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import MachineProfile, PassBytes


def test_draft_level_costs_its_bytes_until_measured():
    profile = MachineProfile((), memory_gbps=500.0)
    cost = CostEstimator(profile, PassBytes((), 10**9), draft_nbytes=13 * 10**9)
    assert cost.level_s == pytest.approx(0.026)
    cost.drafted(4, 4 * 0.05)
    assert 0.026 < cost.level_s < 0.05

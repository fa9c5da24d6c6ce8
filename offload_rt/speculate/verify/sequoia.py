"""Sequoia verification (Chen et al. 2024): top-down, with children drawn without replacement."""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=False, child_sampling="without_replacement")

"""Token by token, for children drawn independently: the rule of SpecInfer (Miao et al. 2024), kept for comparison."""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=False, child_sampling="independent")

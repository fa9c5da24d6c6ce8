"""Token by token, for children drawn without replacement: the rule of Sequoia (Chen et al. 2024)."""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=False, child_sampling="without_replacement")

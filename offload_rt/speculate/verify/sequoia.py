"""Token by token, for children drawn without replacement: the rule of Sequoia (Chen et al. 2024)."""

from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.residual_kernels import verify_top_down

RULE = ResidualRule(verify_top_down, child_sampling="without_replacement")

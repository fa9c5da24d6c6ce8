"""Token by token, for children drawn independently: the rule of SpecInfer (Miao et al. 2024), kept for comparison."""

from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.residual_kernels import verify_top_down

RULE = ResidualRule(verify_top_down, child_sampling="independent")

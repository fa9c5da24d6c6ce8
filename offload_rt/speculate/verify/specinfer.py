"""SpecInfer verification (Miao et al. 2024): top-down, with independently drawn children.

Kept for comparison.
"""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=False, child_sampling="independent")

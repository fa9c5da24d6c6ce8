"""Leaf to root (Weng et al. 2025): a node is tried with the acceptance probability that its subtree left over."""

from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.residual_kernels import verify_bottom_up

RULE = ResidualRule(verify_bottom_up, child_sampling="without_replacement")

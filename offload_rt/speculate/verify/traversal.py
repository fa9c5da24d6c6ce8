"""Leaf to root (Weng et al. 2025): a node is tried with the acceptance probability that its subtree left over."""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=True, child_sampling="without_replacement")

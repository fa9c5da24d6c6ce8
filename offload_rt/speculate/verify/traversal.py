"""Traversal verification (Weng et al. 2025), from the leaves to the root.

A node is tried with the acceptance probability left over by its subtree.
"""

from offload_rt.speculate.residual import ResidualRule

RULE = ResidualRule(bottom_up=True, child_sampling="without_replacement")

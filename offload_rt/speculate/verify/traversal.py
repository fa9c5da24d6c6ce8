"""Leaf to root (Weng et al. 2025): a node is accepted with the mass that its subtree left it."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import traverse

NEEDS_LAWS = True
CHILD_LAW = "without_replacement"

decision = partial(decide, traverse)
verify = partial(verdict_of, traverse)

"""Leaf to root (Weng et al. 2025): a node is accepted with the mass that its subtree left it."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import verify_bottom_up

NEEDS_DRAFT_PROBS = True
CHILD_SAMPLING = "without_replacement"

decision = partial(decide, verify_bottom_up)
verify = partial(verdict_of, verify_bottom_up)

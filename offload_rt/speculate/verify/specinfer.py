"""Token by token, for children drawn independently: the rule of SpecInfer (Miao et al. 2024), kept for comparison."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import verify_top_down

NEEDS_DRAFT_PROBS = True
CHILD_SAMPLING = "independent"

decision = partial(decide, verify_top_down)
verify = partial(verdict_of, verify_top_down)

"""Token by token, for children drawn without replacement: the rule of Sequoia (Chen et al. 2024)."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import verify_top_down

NEEDS_DRAFT_PROBS = True
CHILD_SAMPLING = "without_replacement"

decision = partial(decide, verify_top_down)
verify = partial(verdict_of, verify_top_down)

"""Token by token, for children drawn independently: the rule of SpecInfer (Miao et al. 2024), kept for comparison."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import walk

NEEDS_LAWS = True
CHILD_LAW = "independent"

decision = partial(decide, walk)
verify = partial(verdict_of, walk)

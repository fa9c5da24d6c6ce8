"""Token by token, for children drawn without replacement: the rule of Sequoia (Chen et al. 2024)."""

from functools import partial

from offload_rt.speculate.residual import decide, verdict_of
from offload_rt.speculate.residual_kernels import walk

NEEDS_LAWS = True
CHILD_LAW = "without_replacement"

decision = partial(decide, walk)
verify = partial(verdict_of, walk)

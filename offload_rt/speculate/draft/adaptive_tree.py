"""Tree kind with the best measured speed: dynamic at temperature 0, static and sampled above."""

from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True)

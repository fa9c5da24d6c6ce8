"""Trees of the tokens that the draft thinks most probable, grown anew for each step; none is sampled."""

from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=True)

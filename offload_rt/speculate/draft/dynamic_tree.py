"""Trees of the draft's most probable tokens, grown anew in each step; no token is sampled."""

from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=True)

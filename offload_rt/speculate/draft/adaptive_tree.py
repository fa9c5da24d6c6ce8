"""The kind of tree that was measured to give most: dynamic at temperature 0 and where it knows the noise, else sampled."""

from offload_rt.speculate.tree_drafter import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=False)

"""The kind of tree that was measured to give most: dynamic at temperature 0, of a chosen shape and sampled above."""

from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=False)

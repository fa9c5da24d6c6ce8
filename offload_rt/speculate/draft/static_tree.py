"""Trees of one shape, the best for the measured acceptance and machine (Sequoia; Chen et al. 2024)."""

from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=False, dynamic_above=False)

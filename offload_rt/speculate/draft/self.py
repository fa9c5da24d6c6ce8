"""The target drafts itself with its streamed layers at four bits, which stay on the device (SubSpec: Wang et al. 2025)."""

from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=False, drafts_by_copy=True)

"""Draft with the target's multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437)."""

from offload_rt.speculate.head_model import HeadModel
from offload_rt.speculate.tree_drafter import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=True, needs_model=False, model=HeadModel)

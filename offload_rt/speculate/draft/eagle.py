"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a draft layer on hidden states of the target."""

from offload_rt.speculate.head_model import HeadModel
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter
from offload_rt.weights.heads import open_head

DRAFTER = tree_drafter(
    dynamic_at_zero=True,
    dynamic_above=True,
    resources=DraftResources(find_heads=open_head, open_model=HeadModel),
)

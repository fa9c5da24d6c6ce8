"""Medusa (Cai et al. 2024, arXiv 2401.10774): each head predicts a token at a fixed distance."""

from offload_rt.speculate.head_model import MedusaModel
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter
from offload_rt.weights.heads import open_head

DRAFTER = tree_drafter(
    dynamic_at_zero=True,
    dynamic_above=True,
    resources=DraftResources(find_heads=open_head, open_model=MedusaModel),
)

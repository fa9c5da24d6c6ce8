"""Medusa (Cai et al. 2024, arXiv 2401.10774): trees grown by heads that each predict the token at one distance."""

from offload_rt.speculate.head_model import MedusaModel
from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, dynamic_above=True, model=MedusaModel)

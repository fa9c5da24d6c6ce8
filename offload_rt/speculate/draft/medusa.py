"""Medusa (Cai et al. 2024, arXiv 2401.10774): each head predicts a token at a fixed distance."""

from offload_rt.speculate.tree_types import head_drafter

DRAFTER = head_drafter("head_model.MedusaModel")

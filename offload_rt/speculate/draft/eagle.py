"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a draft layer on hidden states of the target."""

from offload_rt.speculate.tree_types import head_drafter

DRAFTER = head_drafter("head_model.HeadModel")

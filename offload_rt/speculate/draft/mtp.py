"""Draft with the target's multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437)."""

from offload_rt.speculate.tree_types import head_drafter
from offload_rt.weights.heads import find_mtp

DRAFTER = head_drafter("head_model.HeadModel", find_mtp, built_in=True)

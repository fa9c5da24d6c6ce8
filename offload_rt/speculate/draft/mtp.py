"""Draft with the target's multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437)."""

from typing import TYPE_CHECKING, Any

from offload_rt.speculate.tree_types import head_drafter
from offload_rt.weights.heads import find_mtp

if TYPE_CHECKING:
    from offload_rt.speculate.head_model import HeadModel


def _head_model(*parts: Any) -> "HeadModel":
    from offload_rt.speculate.head_model import HeadModel  # not at the top: a plan drafts nothing

    return HeadModel(*parts)


DRAFTER = head_drafter(_head_model, find_mtp, built_in=True)

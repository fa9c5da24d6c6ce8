"""Registry entries of tree drafters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.speculate.protocols import (
    DRAFT_MODEL,
    SELF_SIZES,
    Drafter,
    DrafterType,
    DraftParts,
    DraftResources,
)
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.heads import open_head

if TYPE_CHECKING:  # a plan drafts nothing
    from offload_rt.speculate.draft_model import DraftModel

_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8)
# Larger trees for streamed layers, behind whose transfer a GPU computes further rows.
_STREAMED_SIZES = (4096, 2048)


def tree_drafter(
    dynamic_at_zero: bool,
    dynamic_above: bool,
    resources: DraftResources = DRAFT_MODEL,
) -> DrafterType:
    """Type of a `TreeDrafter`; above temperature 0, the rule decides the sampling of children of
    static trees.
    """

    def opened(parts: DraftParts) -> Drafter:
        from offload_rt.speculate.tree_drafter import TreeDrafter

        return TreeDrafter(parts, is_dynamic=(dynamic_at_zero, dynamic_above))

    return DrafterType(
        open=opened,
        gives_draft_probs=not dynamic_above,
        best_rule="coupled" if dynamic_above else "adaptive" if dynamic_at_zero else "traversal",
        default_sizes=_SIZES if resources.view is None else SELF_SIZES,
        resources=resources,
        streamed_sizes=_STREAMED_SIZES if resources.needs_model and resources.view is None else (),
    )


def head_drafter(
    open_model: Callable[..., DraftModel],
    find_heads: Callable[[Path, Checkpoint], Checkpoint | None] = open_head,
    built_in: bool = False,
) -> DrafterType:
    """Type of a drafter with heads, whose trees are dynamic; see `DraftResources`."""
    resources = DraftResources(find_heads=find_heads, built_in=built_in, open_model=open_model)
    return tree_drafter(dynamic_at_zero=True, dynamic_above=True, resources=resources)

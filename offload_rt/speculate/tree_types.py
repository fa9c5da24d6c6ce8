"""Registry entries of drafters with trees: of the text alone, of a draft model, of heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload_rt.lazy import LazyModule
from offload_rt.speculate.protocols import DRAFT_MODEL, SELF_SIZES, DrafterType, DraftResources
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.heads import open_head

# Lazy: a plan drafts nothing.
_text: Any = LazyModule("offload_rt.speculate.text_drafter")
_trees: Any = LazyModule("offload_rt.speculate.tree_drafter")
_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8)
# Larger trees for streamed layers, behind whose transfer a GPU computes further rows.
_STREAMED_SIZES = (4096, 2048)


def text_drafter(recycles: bool, sizes: tuple[int, ...]) -> DrafterType:
    """Type of a `TextDrafter`."""
    return DrafterType(
        lambda parts: _text.TextDrafter(parts, recycles),
        gives_draft_probs=False,
        best_rule="match",
        default_sizes=sizes,
    )


def tree_drafter(
    dynamic_at_zero: bool = False,
    dynamic_above: bool = False,
    resources: DraftResources = DRAFT_MODEL,
) -> DrafterType:
    """Type of a `TreeDrafter`; above temperature 0, the rule decides the sampling of children."""
    return DrafterType(
        lambda parts: _trees.TreeDrafter(parts, is_dynamic=(dynamic_at_zero, dynamic_above)),
        gives_draft_probs=not dynamic_above,
        best_rule="coupled" if dynamic_above else "adaptive" if dynamic_at_zero else "traversal",
        default_sizes=_SIZES if resources.view is None else SELF_SIZES,
        resources=resources,
        streamed_sizes=_STREAMED_SIZES if resources.needs_model and resources.view is None else (),
    )


def head_drafter(
    model: str,
    find_heads: Callable[[Path, Checkpoint], Checkpoint | None] = open_head,
    built_in: bool = False,
) -> DrafterType:
    """Type of a drafter with heads, whose trees are dynamic; see `DraftResources`."""
    resources = DraftResources(find_heads=find_heads, built_in=built_in, model=model)
    return tree_drafter(dynamic_at_zero=True, dynamic_above=True, resources=resources)

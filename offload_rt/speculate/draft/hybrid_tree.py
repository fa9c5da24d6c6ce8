"""Grown trees; above temperature 0 their nodes have one drawn child beside the given ones."""

from offload_rt.speculate.tree_drafter import DraftParts, TreeDrafter

NEEDS_MODEL = True
GIVES_LAWS = True
BEST_RULE = "traversal"


def open_drafter(parts: DraftParts) -> TreeDrafter:
    """The drawn child is verified first, so a node is not lost where the target wants none of the probable tokens."""
    return TreeDrafter(parts, at_zero="dynamic", above="grown_hybrid")

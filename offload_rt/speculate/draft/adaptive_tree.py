"""The kind of tree that was measured to yield most: grown at temperature 0, of a chosen shape and drawn above."""

from offload_rt.speculate.tree_drafter import DraftParts, TreeDrafter

NEEDS_MODEL = True
GIVES_DRAFT_PROBS = True
BEST_RULE = "traversal"


def open_drafter(parts: DraftParts) -> TreeDrafter:
    """Above temperature 0, children are drawn as the rule wants them."""
    return TreeDrafter(parts, at_zero="dynamic", above=parts.child_sampling)

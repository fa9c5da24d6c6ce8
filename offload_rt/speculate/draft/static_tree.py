"""Trees of one shape, the best for the measured acceptance and machine (Sequoia; Chen et al. 2024)."""

from offload_rt.speculate.tree_drafter import DraftParts, TreeDrafter

NEEDS_MODEL = True
GIVES_DRAFT_PROBS = True
BEST_RULE = "traversal"


def open_drafter(parts: DraftParts) -> TreeDrafter:
    """Children are drawn as the rule wants them, and the most probable ones at temperature 0."""
    return TreeDrafter(parts, at_zero="given", above=parts.child_sampling)

"""Trees of the tokens that the draft thinks most probable, grown anew for each step."""

from offload_rt.speculate.tree_drafter import DraftParts, TreeDrafter

NEEDS_MODEL = True
GIVES_DRAFT_PROBS = False
BEST_RULE = "match"


def open_drafter(parts: DraftParts) -> TreeDrafter:
    """No token is drawn, at any temperature."""
    return TreeDrafter(parts, at_zero="dynamic", above="dynamic")

"""Token recycling: trees of earlier target predictions and copies. Needs no draft model."""

from offload_rt.speculate.protocols import Drafter, DrafterType, DraftParts


def _open(parts: DraftParts) -> Drafter:
    from offload_rt.speculate.text_drafter import TextDrafter

    return TextDrafter(parts, recycles=True)


DRAFTER = DrafterType(
    _open,
    gives_draft_probs=False,
    best_rule="match",
    default_sizes=(512, 256, 128, 64, 32, 16, 8, 4, 1),
)

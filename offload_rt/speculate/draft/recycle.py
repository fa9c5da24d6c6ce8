"""Token recycling: trees of earlier target predictions and copies. Needs no draft model."""

from offload_rt.speculate.tree_types import text_drafter

DRAFTER = text_drafter(recycles=True, sizes=(512, 256, 128, 64, 32, 16, 8, 4, 1))

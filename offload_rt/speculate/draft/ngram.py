"""Prompt lookup (Saxena 2023): copy continuations from earlier text. Needs no draft model."""

from offload_rt.speculate.tree_types import text_drafter

DRAFTER = text_drafter(recycles=False, sizes=(32, 16, 8, 4, 1))

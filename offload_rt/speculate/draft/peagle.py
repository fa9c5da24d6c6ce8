"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that predicts several positions in one pass."""

from offload_rt.speculate.tree_types import head_drafter

DRAFTER = head_drafter("head_model.ParallelModel")

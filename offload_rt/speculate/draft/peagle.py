"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head that predicts several positions in one pass."""

from offload_rt.speculate.head_model import ParallelModel
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter
from offload_rt.weights.heads import open_head

DRAFTER = tree_drafter(
    dynamic_at_zero=True,
    dynamic_above=True,
    resources=DraftResources(find_heads=open_head, open_model=ParallelModel),
)

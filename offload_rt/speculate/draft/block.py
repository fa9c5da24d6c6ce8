"""Block drafters (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394; DSpark).

Trees grow best-first by the distributions of a block's positions (DDTree, arXiv 2604.12989).
"""

from offload_rt.speculate.block_model import BlockModel
from offload_rt.speculate.protocols import DraftResources, tree_drafter
from offload_rt.weights.heads import open_head

DRAFTER = tree_drafter(
    dynamic_at_zero=True,
    dynamic_above=True,
    resources=DraftResources(find_heads=open_head, open_model=BlockModel),
)

"""Self-drafting with the first and most recent cache rows (MagicDec, Chen et al. 2024)."""

from offload_rt.kv.sparse import WindowCache
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(resources=DraftResources(view=WindowCache))

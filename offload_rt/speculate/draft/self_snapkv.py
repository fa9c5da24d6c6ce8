"""Self-drafting with the cache rows that the last tokens attend to (SnapKV, Li et al. 2024)."""

from offload_rt.kv.sparse import SnapKVCache
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(resources=DraftResources(view=SnapKVCache))

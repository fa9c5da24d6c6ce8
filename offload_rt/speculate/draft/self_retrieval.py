"""Self-drafting with retrieved text chunks, ranked by similarity to the query (TriForce, 2024)."""

from offload_rt.kv.sparse import RetrievalCache
from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(resources=DraftResources(view=RetrievalCache))

"""As self_window, with the chunks of the text that are most similar to what is looked for now (TriForce, Sun et al. 2024)."""

from offload_rt.kv.chosen import RetrievalCache
from offload_rt.speculate.protocols import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=False, dynamic_above=False, view=RetrievalCache)

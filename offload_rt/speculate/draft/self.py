"""SubSpec (Wang et al. 2025): draft with 4-bit copies of the streamed layers on the device."""

from offload_rt.speculate.protocols import DraftResources
from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter(dynamic_at_zero=True, resources=DraftResources(copies_target=True))

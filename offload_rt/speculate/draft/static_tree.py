"""Sequoia trees (Chen et al. 2024): a fixed shape, optimal for measured acceptance and machine."""

from offload_rt.speculate.tree_types import tree_drafter

DRAFTER = tree_drafter()

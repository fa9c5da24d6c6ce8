"""Block drafters (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394; DSpark).

Trees grow best-first by the distributions of a block's positions (DDTree, arXiv 2604.12989). While
the link limits a pass, further blocks contain the tokens of the best partial paths.
"""

from collections import abc
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.block_model import BlockModel, BlockState, BlockTreeBuilder
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.protocols import DraftParts, DraftResources
from offload_rt.speculate.static_builder import StaticTreeBuilder
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.speculate.tree_types import tree_drafter
from offload_rt.weights.heads import open_head

# Prior acceptance of the most probable child with the block of its parent, relative to that with a
# conditioned block. Published: 0.22 below siblings, 0.65 to 0.84 on the most probable path (vLLM
# pull request 42910).
_INHERITED = 0.6


class BlockDrafter(TreeDrafter):
    """Grow dynamic trees from blocks; draw static trees for rules that need draft probabilities."""

    def __init__(self, parts: DraftParts, is_dynamic: tuple[bool, bool]) -> None:
        super().__init__(parts, is_dynamic)
        self._n_at_once = self._model.max_levels - 1

    def _grow(self, builders: abc.Sequence[StaticTreeBuilder | DynamicTreeBuilder]) -> int:
        super()._grow(builders)
        states = (builder.state for builder in builders)
        return max((state.n_passes for state in states if isinstance(state, BlockState)), default=0)

    def _dynamic_type(self, sequence: Sequence) -> Callable[..., DynamicTreeBuilder]:
        temperature = sequence.temperature
        prefix = "coupled-" if self._is_coupled(temperature) else ""
        conditioned, inherited = (
            self.pair_stats.at(f"{prefix}{name}", temperature)
            for name in ("conditioned", "inherited")
        )
        root = self.estimates_at(temperature)
        conditioned.acceptance.first = float(root.acceptance.by_rank()[0])
        inherited.acceptance.first = _INHERITED * float(conditioned.acceptance.by_rank()[0])
        return partial(BlockTreeBuilder, conditioned=conditioned, inherited=inherited)


def _open(parts: DraftParts) -> BlockDrafter:
    return BlockDrafter(parts, is_dynamic=(True, False))


# Coupled noise works with dynamic trees at every temperature.
DRAFTER = replace(
    tree_drafter(
        dynamic_at_zero=True,
        dynamic_above=False,
        resources=DraftResources(find_heads=open_head, open_model=BlockModel),
    ),
    open=_open,
    best_rule="coupled",
)

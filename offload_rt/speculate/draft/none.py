"""Plain decoding: trees with a single node."""

from __future__ import annotations

from collections import abc
from typing import TYPE_CHECKING

from offload_rt.cost.tree_size import DraftLimits
from offload_rt.speculate.protocols import Drafter, DrafterType
from offload_rt.tree.topology import DraftTree

if TYPE_CHECKING:
    from offload_rt.executor.sequence import Sequence


class PlainDecoding(Drafter):
    """Propose only the last token."""

    limits = DraftLimits(n_nodes=1, n_levels=1)

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        return [DraftTree.root_only(sequence.tokens[-1]) for sequence in sequences]


DRAFTER = DrafterType(
    lambda _: PlainDecoding(), gives_draft_probs=False, best_rule="match", default_sizes=(1,)
)

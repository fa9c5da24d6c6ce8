"""No drafting: a tree of one node, which is plain decoding."""

from collections.abc import Sequence as Several

import torch

from offload_rt.engine.sequence import Sequence
from offload_rt.tree.topology import DraftTree, Topology

NEEDS_MODEL = False
GIVES_LAWS = False
BEST_RULE = "match"


class Drafter:
    """Proposes nothing beyond the last token."""

    max_nodes = 1

    def propose(self, sequences: Several[Sequence]) -> list[DraftTree]:
        """One tree of one node for each sequence."""
        return [DraftTree(Topology.chain(1), torch.tensor(sequence.tokens[-1:])) for sequence in sequences]

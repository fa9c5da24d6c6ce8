"""No drafting: a tree of one node, which is plain decoding."""

from collections.abc import Sequence as Several

from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.pair_stats import DraftParts, root_only
from offload_rt.speculate.protocols import DraftLimits
from offload_rt.tree.topology import DraftTree, Verdict

NEEDS_MODEL = False
GIVES_DRAFT_PROBS = False
BEST_RULE = "match"


def open_drafter(parts: DraftParts) -> "Drafter":
    """The drafter of this file; it needs no parts."""
    return Drafter()


class Drafter:
    """Proposes nothing beyond the last token."""

    limits = DraftLimits(n_nodes=1, n_levels=1)

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree of one node for each sequence."""
        return [root_only(sequence) for sequence in sequences]

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict) -> None:
        """There is nothing to learn."""

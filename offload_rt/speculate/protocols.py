"""What every drafter and every verification rule offers."""

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.tree.topology import DraftTree, Verdict


@dataclass(frozen=True)
class DraftLimits:
    """How large trees may become.

    n_nodes      of all trees of a pass together, roots included
    n_levels     of one tree, the root's included
    fixed_size   trees have `n_nodes` wherever there is room, whatever that costs; and so `fixed_depth`
    """

    n_nodes: int
    n_levels: int
    fixed_size: bool = False
    fixed_depth: bool = False


class Drafter(Protocol):
    """A function of the tokens, and of what was learned from verdicts: right for any sequence it is handed."""

    limits: DraftLimits

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree of at most `n_nodes` nodes for each sequence; the root is its last token."""

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict) -> None:
        """What became of the tree it proposed last."""


class VerificationRule(Protocol):
    """How a tree is verified."""

    def verify(self, tree: DraftTree, target: Tensor, generator: torch.Generator) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node."""

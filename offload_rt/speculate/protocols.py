"""Interfaces of drafters (draft/) and verification rules (verify/); each file there defines one."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from offload_rt.cost.tree_size import DraftLimits
from offload_rt.speculate.pair_stats import PairStats

if TYPE_CHECKING:  # a plan asks for limits and types alone
    from pathlib import Path

    from torch import Tensor

    from offload_rt.cost.estimator import CostEstimator
    from offload_rt.executor.sequence import Sequence
    from offload_rt.kv.sparse import SparseCache
    from offload_rt.sampling import NodeProbs, TopTokens
    from offload_rt.speculate.draft_model import DraftModel
    from offload_rt.speculate.learner import Learner
    from offload_rt.speculate.predictions import StoredPredictions
    from offload_rt.tree.topology import DraftTree, Topology, Verdict
    from offload_rt.weights.checkpoint import Checkpoint

# Self-drafting: a level costs about as much as a pass, so trees are small.
SELF_SIZES = (64, 32, 16, 8)


class Drafter:
    """Propose token trees and learn from their verification. Any sequence is valid input.

    n_predicted   number of top target predictions per node for `learn`; 0 for none
    reads_prompt  call `read` with the predictions at the last prompt rows, as memory allows
    """

    limits: DraftLimits
    n_predicted: int = 0
    reads_prompt: bool = False

    @property
    def may_pause(self) -> bool:
        """Whether passes without a call of `propose` and `learn` are allowed."""
        return self.limits.n_nodes > 1 and not self.limits.fixed_size

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """Register a sequence: `cache` is its target cache, `n_nodes` the largest tree."""

    def propose(self, sequences: abc.Sequence[Sequence], n_nodes: int) -> list[DraftTree]:
        """Propose a tree of at most `n_nodes` nodes per sequence, rooted at its last token.

        No node, verified or unverified, is deeper than `sequence.n_left - 1`.
        """
        raise NotImplementedError

    def learn(
        self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None
    ) -> None:
        """Learn from the verdict on the latest tree, before the sequence is extended.

        predicted  top target tokens after every node, including rejected and unverified nodes;
                   None if `n_predicted` is 0
        """

    def skip(self, sequence: Sequence) -> None:
        """Record a pass without asking for a draft."""

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Learn from the target's predictions after the prompt's last tokens, without the final."""

    def observe(self, sequence: Sequence, first: int, states: abc.Sequence[Tensor]) -> None:
        """Receive hidden states of newly computed, committed tokens if the runner taps layers.

        first   position of the first token in the sequence
        states  consecutive tensors (n, taps, hidden_size)
        """

    def leave(self, sequence: Sequence) -> None:
        """Handle the end of a sequence whose cache is kept; `transfer` or `end` is called later."""

    def transfer(self, old: Sequence, new: Sequence, n: int) -> int:
        """Transfer the state of `old` to `new`, which reuses its cache and shares n tokens.

        Returns the number of shared tokens that the target can skip.
        """
        return n

    def end(self, sequence: Sequence) -> None:
        """Release all state of a sequence whose cache is released."""

    def save(self) -> None:
        """Save learned statistics and weights for later runs."""


class VerificationRule(Protocol):
    """Accept a path of a tree and draw the bonus token."""

    @property
    def child_sampling(self) -> str | None:
        """Required sibling sampling: "without_replacement", "independent", or None for any tree."""

    @property
    def coupled_up_to(self) -> float:
        """Highest temperature for coupled sampling, which is valid for any tree."""

    def verify(self, tree: DraftTree, target: NodeProbs | Tensor, sequence: Sequence) -> Verdict:
        """Verify a tree at a positive temperature.

        target  distributions (n, vocabulary) after each node, computed when read
        """


@dataclass(frozen=True)
class DraftParts:
    """Constructor arguments of a drafter.

    child_sampling  sibling sampling required by the verification rule
    coupled_up_to   see `VerificationRule.coupled_up_to`
    draft_model     draft model, heads or copies; None if not declared
    self_model      views of the target; None if not declared
    shape           fixed topology in level order; None to select by cost
    learner         trains the draft model; None to keep its weights
    predictions     first candidates of drafters that recycle predictions
    """

    limits: DraftLimits
    cost: CostEstimator
    child_sampling: str
    coupled_up_to: float = 0.0
    draft_model: DraftModel | None = None
    self_model: DraftModel | None = None
    pair_stats: PairStats = field(default_factory=PairStats)
    shape: Topology | None = None
    learner: Learner | None = None
    predictions: StoredPredictions | None = None


@dataclass(frozen=True)
class DraftResources:
    """Models, heads and caches that the engine provides for a drafter.

    needs_model    complete draft model from --draft-model
    find_heads     (directory, target) -> checkpoint of draft heads, None if the directory has none
    built_in       search for the heads in the target's checkpoint without --draft-model
    copies_target  draft with 4-bit copies of the streamed layers, resident on the device
    model          class of the model, heads or copies, below `offload_rt.speculate`
    draft_context  context limit of the draft model; None for all its positions
    view           cache class for views of the target's caches
    view_rows      default budget of verified tokens in a view
    """

    needs_model: bool = False
    find_heads: Callable[[Path, Checkpoint], Checkpoint | None] | None = None
    built_in: bool = False
    copies_target: bool = False
    model: str = "draft_model.DraftModel"
    draft_context: int | None = None
    view: type[SparseCache] | None = None
    view_rows: int = 512

    def open_model(self, *parts: Any) -> DraftModel:
        """Open model, heads or copies."""
        module, _, name = self.model.rpartition(".")
        model: DraftModel = getattr(import_module(f"offload_rt.speculate.{module}"), name)(*parts)
        return model

    @property
    def uses_checkpoint(self) -> bool:
        """Whether --draft-model applies."""
        return self.needs_model or self.find_heads is not None

    @property
    def needs_checkpoint(self) -> bool:
        """Whether --draft-model is required."""
        return self.uses_checkpoint and not self.built_in

    @property
    def is_self_draft(self) -> bool:
        """Whether the target drafts with its layers or copies of them."""
        return self.copies_target or self.view is not None


DRAFT_MODEL = DraftResources(needs_model=True)


@dataclass(frozen=True)
class DrafterType:
    """Registry entry of a drafter.

    gives_draft_probs  children are drawn from known distributions at temperature > 0
    best_rule          default rule, a module name in verify/
    default_sizes      tree sizes, tried in turn until one fits into memory
    streamed_sizes     larger sizes, for layers streamed to a GPU
    n_levels           default depth limit; deeper candidates are rarely reached
    """

    open: Callable[[DraftParts], Drafter]
    gives_draft_probs: bool
    best_rule: str
    default_sizes: tuple[int, ...]
    n_levels: int = 24
    resources: DraftResources = DraftResources()
    streamed_sizes: tuple[int, ...] = ()

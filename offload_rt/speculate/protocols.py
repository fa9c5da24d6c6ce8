"""What every drafter and every verification rule offers; each file of draft/ and verify/ holds one."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from offload_rt.speculate.pair_stats import PairStats

if TYPE_CHECKING:  # a plan asks for limits and types alone
    from torch import Tensor

    from offload_rt.executor.cost import CostEstimator
    from offload_rt.executor.sequence import Sequence
    from offload_rt.kv.sparse import SparseCache
    from offload_rt.sampling import TopTokens
    from offload_rt.speculate.draft_model import DraftModel
    from offload_rt.speculate.learner import Learner
    from offload_rt.tree.topology import DraftTree, Topology, Verdict

# Rows computed for each node of the final tree: a growing tree drops nodes for better ones.
ROWS_PER_NODE = 2
_SIZES = (1024, 512, 256, 128, 64, 32, 16, 8)
# Self-drafting: a level costs about as much as a pass, so trees are small.
SELF_SIZES = (64, 32, 16, 8)


@dataclass(frozen=True)
class DraftLimits:
    """How large trees may become.

    n_nodes      of all trees of a pass together, roots and rows that are never verified included
    n_levels     of one tree, the root's included
    fixed_size   trees have `n_nodes` wherever there is room, whatever that costs; and so `fixed_depth`
    """

    n_nodes: int
    n_levels: int
    fixed_size: bool = False
    fixed_depth: bool = False


class Drafter(Protocol):
    """Proposes trees, and learns from what becomes of them; right for any sequence it is handed.

    n_predicted   how many of the target's most probable tokens `learn` is shown at every node; 0: none
    reads_prompt  whether `read` is shown as many at the last rows of a prompt, as far as there is room for their logits
    """

    limits: DraftLimits
    n_predicted: int = 0
    reads_prompt: bool = False

    def begin(self, sequence: Sequence, cache: int, n_nodes: int) -> None:
        """The sequence begins to run: the target's runner has its rows in this cache, its trees have up to `n_nodes` nodes."""

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        """One tree of at most `n_nodes` nodes for each sequence; the root is its last token.

        No node, verified or not, is deeper than the tokens the sequence has left, less the bonus.
        """

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        """What became of the tree it proposed last; the sequence has not taken the accepted tokens yet.

        predicted  by the target after every node of the tree, rejected and unverified ones too; None for n_predicted = 0
        """

    def read(self, sequence: Sequence, predicted: TopTokens) -> None:
        """What the target predicts after each of the last tokens of the sequence but the very last, computed just now."""
        return

    def observe(self, sequence: Sequence, first: int, states: Several[Tensor]) -> None:
        """Hidden states of the tokens that were computed just now and stay, where the target's runner taps them.

        first   place of the first of these tokens in the sequence
        states  (n, taps, hidden_size), one behind the other
        """
        return

    def leave(self, sequence: Sequence) -> None:
        """The sequence has ended or was aborted; its cache is kept, and what is held for it, until `follow` or `end`."""
        return

    def follow(self, old: Sequence, new: Sequence, n: int) -> int:
        """A sequence takes over the cache of one that has left, with n tokens that they share: so with what is held here.

        Returns how many of these tokens the target need not compute again for the drafter's sake.
        """
        return n

    def end(self, sequence: Sequence) -> None:
        """The sequence has left, and its cache is not kept: release what is held for it."""

    def save(self) -> None:
        """Keep what was learned for later runs."""


class VerificationRule(Protocol):
    """How a tree is verified."""

    @property
    def child_sampling(self) -> str | None:
        """How siblings are to be drawn: "without_replacement" or "independent"; None: it takes any tree."""

    @property
    def coupled_up_to(self) -> float:
        """The temperature up to which it draws by the sequence's noise, which takes any tree, best one that knows the noise."""

    def verify(self, tree: DraftTree, target: Tensor, sequence: Sequence) -> Verdict:
        """What to accept, given the target's distribution (n, vocabulary) after each node, by the sequence's random numbers."""


@dataclass(frozen=True)
class DraftParts:
    """What a drafter is built from.

    child_sampling  by which the rule wants children drawn
    coupled_up_to   the rule's, see `VerificationRule`
    model           None for drafters that need none
    small           drafts for `model`, where a drafter has two
    shape           of every tree, in level order, instead of one chosen for the machine; None to choose
    learner         of the draft model; None where it stays as it is
    """

    limits: DraftLimits
    cost: CostEstimator
    child_sampling: str
    coupled_up_to: float = 0.0
    model: DraftModel | None = None
    small: DraftModel | None = None
    pair_stats: PairStats = field(default_factory=PairStats)
    shape: Topology | None = None
    learner: Learner | None = None


def whole_model(*parts: Any) -> DraftModel:
    """A draft model with a vocabulary and caches of its own."""
    from offload_rt.speculate.draft_model import DraftModel

    return DraftModel(*parts)


@dataclass(frozen=True)
class DrafterType:
    """A drafter as it can be chosen.

    needs_model       a draft model
    gives_draft_probs its children are drawn from distributions that it states, above temperature 0
    best_rule         a name in verify/
    default_sizes     of its trees: they are tried in turn until one fits into memory
    n_levels          of its trees, unless the setting says otherwise; deeper candidates are hardly ever reached
    model             opens its draft model or heads
    view              the kind of cache by which the target itself drafts; None where it does not
    view_rows         verified tokens that such a cache has at most, unless the setting says otherwise
    draft_context     tokens that a draft model sees at most; None: as many as it has positions
    drafts_by_copy    the target drafts itself with small copies of its streamed layers, which stay on the device
    """

    open: Callable[[DraftParts], Drafter]
    needs_model: bool
    gives_draft_probs: bool
    best_rule: str
    default_sizes: tuple[int, ...]
    n_levels: int = 24
    model: Callable[..., DraftModel] = whole_model
    view: type[SparseCache] | None = None
    view_rows: int = 512
    draft_context: int | None = None
    drafts_by_copy: bool = False


def tree_drafter(
    dynamic_at_zero: bool,
    dynamic_above: bool,
    model: Callable[..., DraftModel] = whole_model,
    needs_model: bool = True,
    view: type[SparseCache] | None = None,
    drafts_by_copy: bool = False,
) -> DrafterType:
    """Type of a `TreeDrafter`; above temperature 0, the rule decides the sampling of children of static trees.

    The other arguments are fields of `DrafterType`.
    """

    def opened(parts: DraftParts) -> Drafter:
        from offload_rt.speculate.tree_drafter import TreeDrafter

        return TreeDrafter(parts, is_dynamic=(dynamic_at_zero, dynamic_above))

    return DrafterType(
        open=opened,
        needs_model=needs_model and view is None and not drafts_by_copy,
        gives_draft_probs=not dynamic_above,
        best_rule="coupled" if dynamic_above else "adaptive" if dynamic_at_zero else "traversal",
        default_sizes=_SIZES if view is None else SELF_SIZES,
        model=model,
        view=view,
        drafts_by_copy=drafts_by_copy,
    )


def draft_rows(longest: int, n_nodes: int) -> int:
    """Rows of the draft's cache for a sequence of up to `longest` tokens and trees of up to `n_nodes`."""
    return longest - 1 + ROWS_PER_NODE * n_nodes


def view_rows(budget: int, n_nodes: int) -> int:
    """Rows of a view for drafts of trees of up to `n_nodes`."""
    return budget + ROWS_PER_NODE * n_nodes + 1

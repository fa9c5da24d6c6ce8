"""Predicted decoding: draft time of a tree, its selection, and mean pass time."""

import math
from dataclasses import dataclass

import numpy as np

from offload_rt.cost.estimator import CostEstimator
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.cost.tree_size import TRUST, DraftLimits
from offload_rt.tree.search import expected_tokens, search
from offload_rt.tree.topology import Topology

# Pass times vary evenly with the context, so these contexts represent a whole generation.
_N_CONTEXTS = 12
# Selecting a tree requires the time of a draft level, which depends on the tree.
_ROUNDS = 3


@dataclass(frozen=True)
class PairTimes:
    """Compute times of a target and its draft model.

    draft    a pass of the draft model; None without a draft model
    level_s  seconds per draft level besides compute: the host's wait and node selection
    n_at_once  consecutive tokens that a draft pass predicts, see `Architecture.n_at_once`
    """

    target: ComputeTimes
    draft: ComputeTimes | None = None
    level_s: float = 0.0
    n_at_once: int = 1

    def draft_s(self, topology: Topology, context: int) -> float:
        """Seconds of drafting a tree: a pass per level with children, or one for several tokens."""
        if self.draft is None or len(topology) == 1:
            return 0.0
        inner = topology.depths[np.unique(topology.parents[1:])]
        rows = np.bincount(inner)
        n_levels = len(rows)
        if self.n_at_once > 1:
            rows = np.array([self.n_at_once])
        return float(self.draft.at(rows, context).sum()) + n_levels * self.level_s


def select_topology(
    cost: CostEstimator,
    times: PairTimes,
    acceptance: np.ndarray,
    limits: DraftLimits,
    context: int,
) -> Topology:
    """Select the fastest tree by acceptance (ranks,); a single node if none pays, see `TRUST`."""
    if limits.n_nodes == 1:
        return Topology.chain(1)
    table = search(acceptance, limits.n_nodes, limits.n_levels)
    topology = Topology.chain(2)
    for _ in range(_ROUNDS):
        level_s = times.draft_s(topology, context) / max(topology.n_levels - 1, 1)
        choice = cost.best_tree(table.values, limits, context, level_s=level_s)
        topology = table.topology(choice.n_nodes, choice.n_levels)
        if len(topology) == 1:
            return topology
    plain_s = cost.seconds(np.array([1]), context)[0]
    trusted = 1 + TRUST * (choice.n_tokens - 1)
    pays = choice.token_s * choice.n_tokens < plain_s * trusted
    return topology if pays or limits.fixed_size else Topology.chain(1)


@dataclass(frozen=True)
class Decoding:
    """Predicted decoding speed: expected tokens and mean seconds of a pass."""

    tokens_per_pass: float
    pass_s: float

    @property
    def seconds_per_token(self) -> float:
        """Expected seconds per token."""
        return self.pass_s / self.tokens_per_pass

    def mixed(self, other: "Decoding", share: float) -> "Decoding":
        """Return the means of passes of which `share` are like this and the rest like `other`."""
        tokens = share * self.tokens_per_pass + (1 - share) * other.tokens_per_pass
        return Decoding(tokens, share * self.pass_s + (1 - share) * other.pass_s)


def predict_decoding(
    cost: CostEstimator,
    times: PairTimes,
    topology: Topology,
    acceptance: np.ndarray,
    context: int,
    n_tokens: int,
    tokens_ratio: float = 1.0,
) -> Decoding:
    """Predict decoding of `n_tokens` tokens after `context` tokens, by the same tree in each pass.

    acceptance    (ranks,) acceptance probability by sibling rank
    tokens_ratio  correction factor of the tokens per pass
    """
    tokens = expected_tokens(topology, acceptance)
    if len(topology) > 1:
        tokens = min(tokens_ratio * tokens, topology.n_levels)
    n_contexts = min(math.ceil(n_tokens / tokens), _N_CONTEXTS)
    last = max(context + n_tokens - tokens, context)
    contexts = np.linspace(context, last, n_contexts).astype(int).tolist()
    n_rows = np.array([len(topology)])
    passes = [cost.seconds(n_rows, n, times.draft_s(topology, n))[0] for n in contexts]
    return Decoding(tokens, float(np.mean(passes)))

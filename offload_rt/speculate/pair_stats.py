"""What drafters are built from, and the tree that proposes nothing."""

import hashlib
from dataclasses import dataclass, field

import torch

from offload_rt.executor.cost import CostEstimator
from offload_rt.executor.sequence import Sequence
from offload_rt.models.architecture import Architecture
from offload_rt.speculate.draft_model import DraftModel
from offload_rt.speculate.protocols import DraftLimits
from offload_rt.system.files import read_cached, write_cached
from offload_rt.tree.choose import Acceptance, Calibration, ExpectedTokensBias
from offload_rt.tree.topology import DraftTree, Topology

_FILE, _VERSION = "pairs.json", 3


@dataclass
class PairStats:
    """What was learned of a pair of models, by kind of tree and temperature.

    acceptance   by rank among siblings
    calibration  what the draft's probabilities are worth
    bias       what the expectations that follow from these are worth
    """

    acceptance: dict[str, Acceptance] = field(default_factory=dict)
    calibration: dict[str, Calibration] = field(default_factory=dict)
    bias: dict[str, ExpectedTokensBias] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was learned yet."""
        return not self.acceptance and not self.calibration


def load_pair_stats(target: Architecture, draft: Architecture) -> PairStats:
    """What earlier runs learned of a pair."""
    entry = read_cached(_FILE, _VERSION).get(_pair(target, draft), {})
    try:
        return PairStats(
            {key: Acceptance.of(*counts) for key, counts in entry["acceptance"].items()},
            {key: Calibration.of(*counts) for key, counts in entry["calibration"].items()},
            {key: ExpectedTokensBias.of(*counts) for key, counts in entry["bias"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return PairStats()


def save_pair_stats(target: Architecture, draft: Architecture, pair_stats: PairStats) -> None:
    """Keep what was learned for later runs."""
    entry = {
        "acceptance": {key: one.counts() for key, one in pair_stats.acceptance.items()},
        "calibration": {key: one.counts() for key, one in pair_stats.calibration.items()},
        "bias": {key: one.counts() for key, one in pair_stats.bias.items()},
    }
    write_cached(_FILE, _VERSION, {**read_cached(_FILE, _VERSION), _pair(target, draft): entry})


def _pair(target: Architecture, draft: Architecture) -> str:
    return hashlib.sha256(repr((target, draft)).encode()).hexdigest()[:24]


@dataclass(frozen=True)
class DraftParts:
    """What a drafter is built from.

    model      None for drafters that need none
    child_sampling  by which the rule wants children drawn
    """

    limits: DraftLimits
    cost: CostEstimator
    child_sampling: str
    model: DraftModel | None = None
    pair_stats: PairStats = field(default_factory=PairStats)


def root_only(sequence: Sequence) -> DraftTree:
    """A tree of the last token alone: plain decoding."""
    return DraftTree(Topology.chain(1), torch.tensor(sequence.tokens[-1:]))

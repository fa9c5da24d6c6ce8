"""Acceptance statistics of a target and draft pair, saved between runs."""

import hashlib
from dataclasses import dataclass, field

from offload_rt.cost.tree_size import Acceptance, Calibration, DraftedPasses, ExpectedTokensBias
from offload_rt.system.files import read_cached, write_cached

_FILE = "pairs.json"
_VERSION = 6


@dataclass(frozen=True)
class Estimates:
    """Running estimates for a kind of tree at a temperature.

    acceptance   acceptance rates by sibling rank
    calibration  calibration of draft probabilities
    bias         correction of the resulting expected tokens
    drafted      share of passes with a draft, and their nodes and tokens
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    calibration: Calibration = field(default_factory=Calibration)
    bias: ExpectedTokensBias = field(default_factory=ExpectedTokensBias)
    drafted: DraftedPasses = field(default_factory=DraftedPasses)


@dataclass(frozen=True)
class PairStats:
    """Estimates of a model pair, by kind of tree and temperature.

    pair   cache key; empty to disable saving
    first  prior acceptance of a first child
    """

    estimates: dict[str, Estimates] = field(default_factory=dict)
    pair: str = ""
    first: float = Acceptance.first

    @classmethod
    def load(cls, target: str, draft: str, first: float = Acceptance.first) -> "PairStats":
        """Load the saved estimates of two checkpoints, given by their identities."""
        pair = hashlib.sha256(repr((target, draft)).encode()).hexdigest()[:24]
        entry = read_cached(_FILE, _VERSION).get(pair, {})
        kinds = {
            key: Estimates(
                Acceptance.restore(*acceptance),
                Calibration.restore(*calibration),
                ExpectedTokensBias.restore(*bias),
                DraftedPasses.restore(*drafted),
            )
            for key, (acceptance, calibration, bias, drafted) in entry.items()
        }
        return cls(kinds, pair, first)

    def at(self, kind: str, temperature: float) -> Estimates:
        """Return the mutable estimates for a kind of tree at a temperature."""
        key = f"{kind} {temperature:.1f}"
        if key not in self.estimates:
            self.estimates[key] = Estimates()
            self.estimates[key].acceptance.first = self.first
        return self.estimates[key]

    def save(self) -> None:
        """Save the estimates for later runs."""
        if self.pair and self.estimates:
            entry = {
                key: [ratios.counts() for ratios in vars(estimates).values()]
                for key, estimates in self.estimates.items()
            }
            write_cached(_FILE, _VERSION, {**read_cached(_FILE, _VERSION), self.pair: entry})

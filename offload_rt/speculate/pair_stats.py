"""What was learned of a pair of models, kept between runs."""

import hashlib
from dataclasses import dataclass, field

from offload_rt.system.files import read_cached, write_cached
from offload_rt.tree.choose import Acceptance, Calibration, ExpectedTokensBias

_FILE, _VERSION = "pairs.json", 4


@dataclass(frozen=True)
class Estimates:
    """Running estimates of one kind of tree at one temperature.

    acceptance   by rank among siblings
    calibration  of the draft's probabilities
    bias         of the expectations that follow from these
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    calibration: Calibration = field(default_factory=Calibration)
    bias: ExpectedTokensBias = field(default_factory=ExpectedTokensBias)


@dataclass(frozen=True)
class PairStats:
    """Estimates for a pair of models, by kind of tree and temperature.

    pair   the name it is kept under; empty: it is not kept
    first  acceptance of a first child, before any was seen
    """

    estimates: dict[str, Estimates] = field(default_factory=dict)
    pair: str = ""
    first: float = Acceptance.first

    @classmethod
    def load(cls, target: str, draft: str, first: float = Acceptance.first) -> "PairStats":
        """What earlier runs learned of two checkpoints, by their identities."""
        pair = hashlib.sha256(repr((target, draft)).encode()).hexdigest()[:24]
        entry = read_cached(_FILE, _VERSION).get(pair, {})
        try:
            kinds = {
                key: Estimates(Acceptance.of(*acceptance), Calibration.of(*calibration), ExpectedTokensBias.of(*bias))
                for key, (acceptance, calibration, bias) in entry.items()
            }
        except (TypeError, ValueError, AttributeError, OverflowError):
            kinds = {}
        return cls(kinds, pair, first)

    def at(self, kind: str, temperature: float) -> Estimates:
        """The estimates of a kind of tree, to be read and updated."""
        key = f"{kind} {temperature:.1f}"
        if key not in self.estimates:
            self.estimates[key] = Estimates()
            self.estimates[key].acceptance.first = self.first
        return self.estimates[key]

    def save(self) -> None:
        """Keep what was learned for later runs."""
        if self.pair and self.estimates:
            entry = {
                key: (one.acceptance.counts(), one.calibration.counts(), one.bias.counts())
                for key, one in self.estimates.items()
            }
            write_cached(_FILE, _VERSION, {**read_cached(_FILE, _VERSION), self.pair: entry})

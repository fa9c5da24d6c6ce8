"""How often a draft is right, for pairs of models that are not at hand: what was published, learned
here, or given.

Published are tokens per pass of trees of some size, not the probabilities by rank that a tree is
searched for. So these are of one parameter: of what the first k children of a node leave over, the
power law of Sequoia's analysis (Chen et al. 2024, section 3.1) says (k + 1)^-b, and b is such that
the best tree of the published size and depth gives the published tokens.
"""

from dataclasses import dataclass, replace

import numpy as np

from offload_rt.cost.tree_size import N_RANKS, Acceptance
from offload_rt.errors import SettingsError
from offload_rt.speculate.pair_stats import PairStats

_SEQUOIA = "Sequoia (arXiv 2402.12374)"


@dataclass(frozen=True)
class Assumed:
    """An acceptance by rank, (N_RANKS,), and where it is from."""

    by_rank: np.ndarray
    source: str


@dataclass(frozen=True)
class Preset:
    """Published tokens per pass, and the power law that gives them.

    pair             target and draft, by their names; SELF for a target that drafts itself with
                     copies at four bits
    tokens_per_pass  of trees of `n_nodes` nodes on `n_levels` levels
    power            b, see above; a test searches the tree and compares
    """

    name: str
    pair: tuple[str, str]
    temperature: float
    tokens_per_pass: float
    n_nodes: int
    n_levels: int
    power: float
    source: str

    @property
    def assumed(self) -> Assumed:
        """Its acceptance, and where it is from in words."""
        return Assumed(
            power_law(self.power),
            f"a power law (b = {self.power}) fitted to {self.tokens_per_pass} tokens per pass of"
            f" trees of {self.n_nodes} nodes on {self.n_levels} levels at T={self.temperature}:"
            f" {self.source}",
        )


SELF = "self"
_LLAMA_2 = ("llama2-70b", "llama2-7b")
_LLAMA_3 = ("llama3-70b", "llama3-8b")
PRESETS = (
    Preset("llama2-70b-chat", _LLAMA_2, 0.0, 10.30, 768, 18, 2.375, f"{_SEQUOIA}, MT-Bench, L40"),
    Preset(
        "llama2-70b-chat-0.6", _LLAMA_2, 0.6, 9.91, 768, 18, 2.297, f"{_SEQUOIA}, MT-Bench, L40"
    ),
    Preset(
        "llama3-70b-instruct", _LLAMA_3, 0.0, 11.68, 768, 18, 2.654, f"{_SEQUOIA}, MT-Bench, L40"
    ),
    Preset(
        "llama2-7b-68m", ("llama2-7b", "llama-68m"), 0.0, 5.08, 128, 10, 1.534, f"{_SEQUOIA}, A100"
    ),
    # Six nodes on each of 48 levels below the root (github.com/NYCU-EDgeAi/subspec, README and
    # configs).
    Preset(
        "qwen2.5-7b-self",
        ("qwen2.5-7b", SELF),
        0.0,
        28.35,
        289,
        49,
        4.864,
        "SubSpec (arXiv 2509.18344), MT-Bench",
    ),
)


def power_law(b: float) -> np.ndarray:
    """(N_RANKS,) such that (k + 1)^-b is left over after k children."""
    left = np.arange(1, N_RANKS + 2, dtype=np.float64) ** -b
    return left[:-1] - left[1:]


def assume(name: str, pair: tuple[str, str], names: tuple[str, str], temperature: float) -> Assumed:
    """The acceptance of a pair of models.

    name   a preset's, probabilities by rank like "0.8,0.1,0.05", or "auto": what was measured here,
           else a preset of this
           pair, else a guess
    pair   identities of the checkpoints; empty where there is none
    names  by which the user calls the models; SELF for a target that drafts itself
    Raises SettingsError for a name that is none of these.
    """
    if name[:1].isdigit() or name[:1] == ".":
        return Assumed(_parsed(name), "given by --acceptance")
    presets = {preset.name: preset for preset in PRESETS}
    if name in presets:
        return presets[name].assumed
    if name != "auto":
        raise SettingsError(
            f"--acceptance {name!r} is not known", have=", ".join(("auto", *presets)),
            change='use one of these, or probabilities by rank like "0.8,0.1,0.05"',
        )  # fmt: skip
    learned = _learned(PairStats.load(*pair), temperature)
    fitting = [
        one.assumed for one in PRESETS if (one.pair, one.temperature) == (names, temperature)
    ]
    guess = Assumed(
        Acceptance().by_rank(),
        "a guess: neither published nor measured for this pair and temperature",
    )
    # what is published of another model, whose copies were made with more care
    if names[1] == SELF:
        of_other = presets["qwen2.5-7b-self"].assumed
        guess = replace(of_other, source=f"a guess: for qwen2.5-7b {of_other.source}")
    return learned or (fitting[0] if fitting else guess)


def _learned(pair_stats: PairStats, temperature: float) -> Assumed | None:
    """What was learned of trees of a chosen shape, or of grown ones; None where nothing was at this
    temperature.
    """
    known = [(key.split(), one.acceptance) for key, one in pair_stats.estimates.items()]
    found = [(acceptance, kind) for (kind, at), acceptance in known if at == f"{temperature:.1f}"]
    acceptance, kind = max(found, key=lambda one: one[0].tries[0], default=(Acceptance(), ""))
    if acceptance.tries[0] < 1:
        return None
    return Assumed(acceptance.by_rank(), f"measured on this machine, of {kind} trees")


def _parsed(text: str) -> np.ndarray:
    try:
        given = np.array([float(part) for part in text.split(",")])
    except ValueError:
        given = np.array([np.nan])
    # Written so that a number that is none fails too.
    if len(given) > N_RANKS or not (
        (given >= 0).all() and given.sum() <= 1 and (np.diff(given) <= 0).all()
    ):
        need = f"up to {N_RANKS} probabilities, descending, that sum to 1 at most"
        raise SettingsError(
            f"--acceptance {text!r}", need=need, change='write them like "0.8,0.1,0.05"'
        )
    return np.pad(given, (0, N_RANKS - len(given)))

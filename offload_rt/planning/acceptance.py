"""Acceptance of drafts by rank: published, measured on this machine, or set by the user.

Papers publish tokens per pass for a tree size, but the tree search needs probabilities by rank.
Presets therefore use the power law of Sequoia's analysis (Chen et al. 2024, section 3.1): the first
k children of a node are all rejected with probability (k + 1)^-b. The exponent b is fitted. With
it, the best tree of the published size and depth reaches the published tokens per pass.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from offload_rt.cost.tree_size import N_RANKS, Acceptance
from offload_rt.errors import SettingsError
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.tree.search import search

# Tokens per pass of dynamic trees relative to static trees of as many nodes, demonstration pair at
# T = 0: 1.15 with 64 nodes, 1.19 with 512 (`python -m bench.speculate.systems --rows 64 512
# --temperatures 0 --systems "static, match" "dynamic, match"`).
_DYNAMIC_RATIO = 1.15
# Tokens per pass of dynamic trees relative to trees extrapolated from a chain of 8 nodes,
# demonstration EAGLE-3 head at T = 0: 0.83 with 64 nodes, 0.78 with 256 (`python -m
# bench.speculate.systems --rows 8 64 256 --depth 8 --temperatures 0 --prompts 12`).
_CHAIN_RATIO = 0.8
# Levels of the fixed trees to which measured tokens are compared.
_MOST_LEVELS = 32
DEMO_PAIR = "measured with the demonstration pair"


@dataclass(frozen=True)
class Assumed:
    """Acceptance by rank, (N_RANKS,), and its source in words.

    is_static      published or measured for trees of a fixed shape
    dynamic_ratio  factor of the tokens per pass of trees grown by confidence
    drafted        share of passes with a draft
    """

    by_rank: np.ndarray
    source: str
    is_static: bool = False
    dynamic_ratio: float = 1.0
    drafted: float = 1.0

    def with_dynamic_trees(self) -> "Assumed":
        """Return the acceptance of dynamic trees at temperature 0, if this is of static trees."""
        trees = "dynamic instead of static trees"
        return self._scaled(_DYNAMIC_RATIO, trees) if self.is_static else self

    def extrapolated(self) -> "Assumed":
        """Return the acceptance of trees, if this is of a chain."""
        return self._scaled(_CHAIN_RATIO, "trees extrapolated from a chain")

    def _scaled(self, ratio: float, trees: str) -> "Assumed":
        source = f"{self.source}; times {ratio} for {trees}, {DEMO_PAIR}"
        return replace(self, source=source, dynamic_ratio=ratio)


@dataclass(frozen=True)
class Preset:
    """Published tokens per pass and the fitted power law.

    pair             names of target and draft; the draft is SELF for 4-bit copies of the target,
                     RECYCLE for predictions of earlier tokens
    tokens_per_pass  published for trees of `n_nodes` nodes on `n_levels` levels
    power            exponent b of the module docstring; a test repeats the tree search
    is_static        published for trees of a fixed shape
    """

    name: str
    pair: tuple[str, str]
    temperature: float
    tokens_per_pass: float
    n_nodes: int
    n_levels: int
    power: float
    source: str
    is_static: bool = True

    @property
    def assumed(self) -> Assumed:
        """Return the acceptance by rank with its source."""
        source = (
            f"a power law (b = {self.power}) fitted to {self.tokens_per_pass} tokens per pass of"
            f" trees of {self.n_nodes} nodes on {self.n_levels} levels at T={self.temperature}:"
            f" {self.source}"
        )
        return Assumed(power_law(self.power), source, self.is_static)


SELF = "self"
RECYCLE = "recycle"
# Published acceptance of pairs, and published tokens per second of other programs by model.
# SubSpec's trees have 48 levels of six nodes (github.com/NYCU-EDgeAi/subspec, README, configs).
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PRESETS = tuple(Preset(**{**entry, "pair": tuple(entry["pair"])}) for entry in PUBLISHED["presets"])
# Assumed for other targets. Optimistic for copies: the published copies were quantised more
# carefully than ours.
_EXAMPLES = {SELF: ("qwen2.5-7b-self", "qwen2.5-7b"), RECYCLE: ("vicuna-7b-recycle", "vicuna-7b")}


def power_law(b: float) -> np.ndarray:
    """Return acceptance by rank, (N_RANKS,); k children are all rejected with (k + 1)^-b."""
    rejected = np.arange(1, N_RANKS + 2, dtype=np.float64) ** -b
    return rejected[:-1] - rejected[1:]


def assume(name: str, pair: tuple[str, str], names: tuple[str, str], temperature: float) -> Assumed:
    """Return the acceptance of a pair of models.

    name   name of a preset, probabilities by rank like "0.8,0.1,0.05", or "auto";
           auto: measured on this machine, else a preset of the pair, else a guess
    pair   identities of the checkpoints; empty without local files
    names  model names in the user's words; the draft is SELF or RECYCLE without a draft model
    Raises SettingsError for an unknown name.
    """
    if name[:1].isdigit() or name[:1] == ".":
        return Assumed(_parsed(name), "set by --acceptance")
    presets = {preset.name: preset for preset in PRESETS}
    if name in presets:
        return presets[name].assumed
    if name != "auto":
        raise SettingsError(
            f"--acceptance {name!r} is not known", have=", ".join(("auto", *presets)),
            change='use one of these, or probabilities by rank like "0.8,0.1,0.05"',
        )  # fmt: skip
    learned = _learned(PairStats.load(*pair), temperature)
    if learned is not None:
        return learned
    for preset in PRESETS:
        if (preset.pair, preset.temperature) == (names, temperature):
            return preset.assumed
    if names[1] in _EXAMPLES:
        example, model = _EXAMPLES[names[1]]
        published = presets[example].assumed
        return replace(published, source=f"a guess: for {model} {published.source}")
    source = "a guess: neither published nor measured for this pair and temperature"
    return Assumed(Acceptance().by_rank(), source)


def _learned(pair_stats: PairStats, temperature: float) -> Assumed | None:
    suffix = f" {temperature:.1f}"
    measured = [
        (estimates, key.removesuffix(suffix))
        for key, estimates in pair_stats.estimates.items()
        if key.endswith(suffix) and estimates.acceptance.tries[0] >= 1
    ]
    if not measured:
        return None
    best, kind = max(measured, key=lambda pair: pair[0].acceptance.tries[0])
    by_rank = best.acceptance.by_rank()
    share, n_nodes, n_tokens = best.drafted.means
    # Acceptance by rank describes trees of fixed shape.
    n = round(n_nodes)
    ratio = n_tokens / float(search(by_rank, n, min(n, _MOST_LEVELS)).values[n, -1])
    source = (
        f"measured on this machine, of {kind} trees in {share:.0%} of the passes,"
        f" with {ratio:.2f} times the tokens of fixed trees"
    )
    return Assumed(by_rank, source, dynamic_ratio=ratio, drafted=share)


def _parsed(text: str) -> np.ndarray:
    try:
        by_rank = np.array(text.split(","), dtype=float)
    except ValueError:
        by_rank = np.array([np.nan])
    # Every comparison with NaN is false, so NaN is refused too.
    is_valid = (by_rank >= 0).all() and by_rank.sum() <= 1 and (np.diff(by_rank) <= 0).all()
    if len(by_rank) > N_RANKS or not is_valid:
        need = f"up to {N_RANKS} descending probabilities with a sum of at most 1"
        change = 'write them like "0.8,0.1,0.05"'
        raise SettingsError(f"--acceptance {text!r}", need=need, change=change)
    return np.pad(by_rank, (0, N_RANKS - len(by_rank)))

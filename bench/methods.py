"""Ways of decoding, compared at equal size: shapes of trees, drafters, and verification rules."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from bench.measure import ROOT
from offload_rt import LLM
from offload_rt.speculate.protocols import DraftLimits
from offload_rt.tree.topology import Topology

TARGET, DRAFT = str(ROOT / "models/demo-target"), str(ROOT / "models/demo-draft")
_N_LEVELS = 24


def chain(n: int) -> Topology:
    """One candidate after the other."""
    return Topology.chain(n)


def k_ary(n: int, k: int = 3) -> Topology:
    """Every node has k children, level by level."""
    return Topology(np.array([-1, *((node - 1) // k for node in range(1, n))]))


def chains(n: int, length: int = 8) -> Topology:
    """As many chains of a length as fit, side by side, in level order: the trees of SpecInfer."""
    n_chains = (n - 1) // length
    first = np.arange(n_chains * length) - n_chains + 1
    return Topology(np.concatenate(([-1], np.maximum(first, 0))))


@dataclass(frozen=True)
class Method:
    """A way of decoding; `shape` makes a tree of a size where the drafter does not choose its own."""

    name: str
    drafter: str
    rule: str = "auto"
    shape: Callable[[int], Topology] | None = None

    def open(self, model: str, n_nodes: int, dtype: str, device_memory: str | int, max_model_len: int) -> LLM:
        """A model that decodes this way, with trees of so many nodes whatever they cost."""
        pair = {} if self.drafter == "ngram" else {"draft_model": DRAFT}
        depth = n_nodes if self.shape is chain else _N_LEVELS
        llm = LLM(
            model, **pair, drafter=self.drafter, rule=self.rule, dtype=dtype, device_memory=device_memory,
            max_model_len=max_model_len, tree_size=n_nodes, tree_depth=depth,
        )  # fmt: skip
        # A fixed size, and the draft as good as free: the best tree of this size, not the best for this machine.
        llm.engine.drafter.limits = DraftLimits(n_nodes, depth, fixed_size=True)
        llm.engine.cost.drafted = lambda n_passes, seconds: None
        llm.engine.cost.level_s = 0.0
        if self.shape is not None:
            llm.engine.drafter.fix_shape(self.shape(n_nodes))
        return llm


METHODS = (
    Method("n-gram", "ngram"),
    Method("chain", "static_tree", "sequoia", chain),
    Method("3-ary", "static_tree", "sequoia", k_ary),
    Method("SpecInfer chains", "static_tree", "specinfer", chains),
    Method("Sequoia", "static_tree", "sequoia"),
    Method("Sequoia tree + traversal", "static_tree", "traversal"),
    Method("dynamic", "dynamic_tree"),
)
# Which is expected to give more tokens per pass: (better, worse).
PAIRS = (
    ("Sequoia", "chain"),
    ("Sequoia", "SpecInfer chains"),
    ("Sequoia", "3-ary"),
    ("Sequoia tree + traversal", "chain"),
    ("Sequoia tree + traversal", "SpecInfer chains"),
    ("Sequoia tree + traversal", "Sequoia"),
    ("dynamic", "chain"),
    ("dynamic", "SpecInfer chains"),
    ("dynamic", "Sequoia"),
    ("Sequoia", "transformers, assisted"),
)

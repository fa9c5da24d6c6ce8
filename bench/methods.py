"""Ways of decoding, compared at equal size: shapes of trees, drafters, and verification rules."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.measure import ROOT
from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import drafter_type, pick_drafter
from offload_rt.tree.topology import Topology

TARGET, DRAFT = str(ROOT / "models/demo-target"), str(ROOT / "models/demo-draft")


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
        config = EngineConfig(
            model, DRAFT if drafter_type(self.drafter).needs_model else None, dtype=dtype,
            device_memory=device_memory, max_model_len=max_model_len, drafter=self.drafter, rule=self.rule,
            tree_size=None if self.drafter == "none" else n_nodes,
            tree_depth=n_nodes if self.shape is chain else None,
        )  # fmt: skip
        drafting = pick_drafter(config)
        shape = self.shape(n_nodes) if self.shape is not None else None

        def open_drafter(parts: DraftParts) -> Drafter:
            # The draft is as good as free: the best tree of this size, not the best for this machine.
            return drafting.type.open(replace(parts, cost=parts.cost.fixed(level_s=0.0), shape=shape))

        llm = LLM.open(config, replace(drafting, type=replace(drafting.type, open=open_drafter)))
        llm.load()
        return llm


METHODS = (
    Method("n-gram", "ngram"),
    Method("chain", "static_tree", "sequoia", chain),
    Method("3-ary", "static_tree", "sequoia", k_ary),
    Method("SpecInfer chains", "static_tree", "specinfer", chains),
    Method("Sequoia", "static_tree", "sequoia"),
    Method("Sequoia tree + traversal", "static_tree", "traversal"),
    Method("dynamic", "dynamic_tree", "match"),
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

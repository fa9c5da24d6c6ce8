"""Ways of decoding, compared at equal size: shapes of trees, drafters, and verification rules."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np

from bench.measure import ROOT
from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import drafter_type, pick_drafter
from offload_rt.tree.topology import Topology

_CONTEXT = 512
TARGET = str(ROOT / "models/demo-target")
DRAFT = str(ROOT / "models/demo-draft")


def chain(n: int) -> Topology:
    """One candidate after the other."""
    return Topology.chain(n)


def chains(n: int, length: int = 8) -> Topology:
    """As many chains of a length as fit, side by side, in level order: the trees of SpecInfer."""
    n_chains = (n - 1) // length
    first = np.arange(n_chains * length) - n_chains + 1
    return Topology(np.concatenate(([-1], np.maximum(first, 0))))


@dataclass(frozen=True)
class Method:
    """A way of decoding.

    shape          makes a tree of a size where the drafter does not choose its own
    draft_context  tokens in the view that it drafts with
    """

    name: str
    drafter: str
    rule: str = "auto"
    shape: Callable[[int], Topology] | None = None
    draft_context: int | None = None

    def open(
        self, model: str, n_nodes: int, dtype: str, device_memory: str | int, max_model_len: int
    ) -> LLM:
        """A model that decodes this way, with trees of so many nodes whatever they cost."""
        uses_draft = drafter_type(self.drafter).resources.needs_checkpoint
        draft = DRAFT if uses_draft else None
        config = EngineConfig(
            model, draft, dtype=dtype,
            device_memory=device_memory, max_model_len=max_model_len, drafter=self.drafter,
            rule=self.rule,
            draft_context=self.draft_context, tree_size=None if self.drafter == "none" else n_nodes,
            tree_depth=n_nodes if self.shape is chain else None,
        )  # fmt: skip
        chosen = pick_drafter(config)
        shape = self.shape(n_nodes) if self.shape is not None else None

        def open_drafter(parts: DraftParts) -> Drafter:
            # The draft is as good as free: the best tree of this size, not the best for this
            # machine.
            return chosen.type.open(replace(parts, cost=parts.cost.fixed(level_s=0.0), shape=shape))

        drafting = replace(chosen, type=replace(chosen.type, open=open_drafter))
        llm = LLM.open(config, drafting)
        # of streamed layers: as little memory as will do, so that all are
        if drafting.type.resources.copies_target:
            plan = llm.plan
            least = (
                plan.reserved.total
                + len(plan.tiers) * plan.reserved.stand_in
                + 2 * plan.slot_nbytes
            )
            llm = LLM.open(replace(config, device_memory=least), drafting)
        llm.load()
        return llm


SYSTEMS = (
    Method("ngram", "ngram"),
    Method("lookahead", "lookahead"),
    Method("recycle", "recycle"),
    Method("self", "self"),
    Method("one chain", "static_tree", "sequoia", chain),
    Method("SpecInfer's chains", "static_tree", "specinfer", chains),
    Method("static, specinfer", "static_tree", "specinfer"),
    Method("static, sequoia", "static_tree", "sequoia"),
    Method("static, traversal", "static_tree", "traversal"),
    Method("static, match", "static_tree", "match"),
    Method("static, coupled", "static_tree", "coupled"),
    Method("dynamic, match", "dynamic_tree", "match"),
    Method("dynamic, coupled", "dynamic_tree", "coupled"),
    Method("adaptive", "adaptive_tree"),
)
# For texts that are longer than what drafts: those that draft by a part of the text, beside two
# that do not.
LONG = (
    Method("ngram", "ngram"),
    Method("recycle", "recycle"),
    *(
        Method(name, name, draft_context=_CONTEXT)
        for name in ("self_window", "self_snapkv", "self_retrieval", "triforce")
    ),
)


@contextmanager
def no_pair_stats() -> Iterator[None]:
    """With an empty cache folder: statistics of earlier runs are not used, those of this run are
    not kept.
    """
    with (
        tempfile.TemporaryDirectory() as empty,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": empty}),
    ):
        yield

"""Decoding methods for comparisons: tree shapes, drafters and verification rules."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from bench.common.checkpoints import BLOCK, DRAFT, EAGLE3
from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import drafter_type, pick_drafter
from offload_rt.speculate.tree_drafter import TreeDrafter
from offload_rt.tree.topology import Topology
from offload_rt.weights.rounding import ROUNDINGS

_CONTEXT = 512


def chain(n: int) -> Topology:
    """Return a chain of n nodes."""
    return Topology.chain(n)


def chains(n: int, length: int = 8) -> Topology:
    """Return parallel chains in level order, the trees of SpecInfer."""
    n_chains = (n - 1) // length
    first = np.arange(n_chains * length) - n_chains + 1
    return Topology(np.concatenate(([-1], np.maximum(first, 0))))


@dataclass(frozen=True)
class Method:
    """A decoding method.

    shape          tree of a size, for drafters with a fixed shape
    draft_context  tokens in the drafter's view of the target's cache
    rounding       weight format of the draft model, see `--draft-quantize`
    draft          directory of the draft model or head
    level_s        assumed seconds per draft level
    """

    name: str
    drafter: str
    rule: str = "auto"
    shape: Callable[[int], Topology] | None = None
    draft_context: int | None = None
    rounding: str = "none"
    draft: str = DRAFT
    level_s: float = 0.0

    def open(
        self, model: str, n_nodes: int, dtype: str, device_memory: str | int, max_model_len: int,
        depth: int | None = None,
    ) -> LLM:  # fmt: skip
        """Open a model with this method and trees of n nodes, independent of cost.

        depth  levels of trees with several children; None for the drafter's default
        """
        uses_draft = drafter_type(self.drafter).resources.needs_checkpoint
        draft = self.draft if uses_draft else None
        config = EngineConfig(
            model, draft, dtype=dtype,
            device_memory=device_memory, max_model_len=max_model_len, drafter=self.drafter,
            rule=self.rule,
            draft_context=self.draft_context, draft_quantize=self.rounding,
            tree_size=None if self.drafter == "none" else n_nodes,
            tree_depth=n_nodes if self.shape is chain else depth,
        )  # fmt: skip
        chosen = pick_drafter(config)
        shape = self.shape(n_nodes) if self.shape is not None else None

        def open_drafter(parts: DraftParts) -> Drafter:
            # A fixed cost makes trees independent of the machine.
            fixed = replace(parts, cost=parts.cost.fixed(self.level_s), shape=shape)
            if shape is not None:
                return TreeDrafter(fixed, is_dynamic=(False, False))
            return chosen.type.open(fixed)

        drafting = replace(chosen, type=replace(chosen.type, open=open_drafter))
        llm = LLM.open(config, drafting)
        # Minimum memory, so that all layers are streamed.
        if drafting.type.resources.copies_target:
            plan = llm.plan
            copies = len(plan.tiers) * plan.reserved.stand_in
            least = plan.reserved.total + copies + 2 * plan.slot_nbytes
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
    Method("EAGLE-3", "eagle", draft=EAGLE3),
    Method("EAGLE-3, one chain", "eagle", "match", chain, draft=EAGLE3),
    # A pass over further blocks costs more than it gains, or nothing.
    Method("block", "block", draft=BLOCK, level_s=1e9),
    Method("conditioned block", "block", draft=BLOCK),
    *(Method(f"adaptive, {name} draft", "adaptive_tree", rounding=name) for name in ROUNDINGS),
)
# For long texts: drafters with a view of a part of the text, and two without.
LONG = (
    Method("ngram", "ngram"),
    Method("recycle", "recycle"),
    *(
        Method(name, name, draft_context=_CONTEXT)
        for name in ("self_window", "self_snapkv", "self_retrieval", "triforce")
    ),
)

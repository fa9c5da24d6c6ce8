"""Selection of the draft model's weight format: unquantised, or quantised while it is loaded."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from offload_rt.config import EngineConfig
from offload_rt.cost.tree_size import Acceptance
from offload_rt.engine.memory_plan import MemoryPlan
from offload_rt.engine.model_sizes import Sizes
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.packing import coded_reads
from offload_rt.tree.search import search

# Tokens per pass relative to the unquantised draft model, measured with the demonstration pair and
# 64 nodes: `python -m bench.speculate.systems --systems adaptive "adaptive, int4 draft"`.
KEPT_TOKENS = {"none": 1.0, "int4": 0.96, "int8": 1.0, "fp8": 0.99}
# Formats of `auto`; formats of 8 bits save less memory.
_AUTO = ("none", "int4")
# Select a quantised draft model if it saves this share of the time per token: the estimates are not
# more precise.
_LEAST_GAIN = 0.02
# Rate of a GPU's memory relative to its link: 1,008 / 25 GB/s of an RTX 4090, more on others.
_MEMORY_RATE = 40

Fit = Callable[[Sizes | None, EngineConfig], MemoryPlan]


class PlannedDraft(NamedTuple):
    """A draft model in its weight format, and the memory plan with it."""

    sizes: Sizes | None
    memory: MemoryPlan

    @property
    def rounding(self) -> str:
        """Format of weights quantised while they are loaded; "none" otherwise."""
        return "none" if self.sizes is None else self.sizes.rounding


def fixed_rounding(config: EngineConfig, draft: Sizes | None, can_round: bool) -> str | None:
    """Return the only possible format, or None if `auto` selects among several.

    can_round  whether the weights of the draft model are unquantised and remain unchanged
    Raises SettingsError if the draft model cannot be quantised as the settings require.
    """
    rounding = config.draft_quantize
    if draft is not None and draft.rounding != "none":
        return draft.rounding
    can_round = can_round and draft is not None and draft.spec.supports_self_draft
    if rounding not in ("auto", "none") and not can_round:
        problem = f"--draft-quantize {rounding}"
        need = "an unquantised draft model of a native family, without --learn-draft"
        have = "none" if draft is None else f"a draft model of type {draft.spec.family}"
        raise SettingsError(problem, need=need, have=have, change="omit --draft-quantize")
    return "none" if not can_round else None if rounding == "auto" else rounding


def plan_draft(
    config: EngineConfig, draft: Sizes | None, can_round: bool, has_card: bool, fit: Fit
) -> PlannedDraft:
    """Select the weight format of the draft model, and plan memory by `fit`.

    `auto` compares the time of streamed bytes and of draft levels per expected token. It keeps the
    weights without streamed layers, and on a CPU, where int4 products may be slower.
    """
    rounding = fixed_rounding(config, draft, can_round)
    if rounding is None and not has_card:
        rounding = "none"
    if draft is not None and rounding is None:
        return _fastest(config, draft, fit)
    sizes = draft.rounded(rounding) if draft is not None and rounding else None
    return PlannedDraft(sizes, fit(sizes, config))


def _fastest(config: EngineConfig, draft: Sizes, fit: Fit) -> PlannedDraft:
    fitting = list[PlannedDraft]()
    for sizes in map(draft.rounded, _AUTO):
        if not (fitting and fitting[-1].memory.plan.is_resident):
            with suppress(CapacityError):
                fitting.append(PlannedDraft(sizes, fit(sizes, config)))
    if not fitting:
        fit(draft, config)  # raises the error
    per_token = _cost_per_token(fitting, config.max_num_seqs, draft.nbytes)
    best = min(range(len(fitting)), key=per_token.__getitem__)
    return fitting[best if per_token[best] < (1 - _LEAST_GAIN) * per_token[0] else 0]


def _cost_per_token(
    plans: Sequence[PlannedDraft], n_sequences: int, plain_nbytes: int
) -> list[float]:
    """Return the time of each plan per expected token, in streamed bytes, for a fair draft."""
    limits = [plan.memory.limits for plan in plans]
    tokens = [1.0] * len(plans)
    if len({limit.n_nodes for limit in limits}) > 1:
        largest = max(limits, key=lambda limit: limit.n_nodes)
        values = search(Acceptance().by_rank(), largest.n_nodes, largest.n_levels).values
        tokens = [float(values[limit.n_nodes, limit.n_levels]) for limit in limits]
    return [
        (
            sum(plan.memory.plan.pass_bytes.at(0, n_sequences).values())
            + plan.memory.limits.n_levels * _level_nbytes(plan, plain_nbytes) / _MEMORY_RATE
        )
        / (KEPT_TOKENS[plan.rounding] * n_tokens)
        for plan, n_tokens in zip(plans, tokens, strict=True)
    ]


def _level_nbytes(plan: PlannedDraft, plain_nbytes: int) -> int:
    sizes = plan.sizes
    assert sizes is not None, "a draft model is planned"
    n_rows = plan.memory.limits.n_nodes / plan.memory.limits.n_levels
    if sizes.matrix is None:
        return sizes.nbytes
    is_coded = n_rows <= sizes.matrix.n_coded_rows(sizes.dtype)
    return sizes.nbytes * coded_reads(n_rows) if is_coded else sizes.nbytes + 2 * plain_nbytes

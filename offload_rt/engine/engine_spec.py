"""Specification of an engine: target, draft and ranks, with their memory plan."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload_rt.config import EngineConfig, format_size
from offload_rt.cost.pass_times import PassBytes, lossless_gain
from offload_rt.engine import profile
from offload_rt.engine.device import device_notice, memory_budget, pick_device
from offload_rt.engine.draft_rounding import fixed_rounding, plan_draft
from offload_rt.engine.draft_spec import DraftSpec
from offload_rt.engine.link import LinkFormat, as_they_are, choose_link
from offload_rt.engine.memory_plan import MemoryPlan, plan_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.engine.ranks_spec import RanksSpec
from offload_rt.engine.target_spec import TargetFiles, TargetSpec, compute_dtype
from offload_rt.errors import CapacityError, SettingsError, UnsupportedModelError
from offload_rt.offload.mirrors import Mirrors
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.ops import cpu, extension
from offload_rt.packing import LOSSLESS_SHARE
from offload_rt.speculate.select import Drafting
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import BlockRecord
from offload_rt.weights.view import Arithmetic

# Least ratio of pass times at which `run` recommends to encode the layers.
_LEAST_GAIN = 1.1
_NO_ROOM = (
    "images are off: the vision tower does not fit; raise --device-memory, or lower"
    " --max-image-pixels"
)
_STREAMED_TOWER = (
    "the vision tower is streamed from disk for each image: it does not fit; raise"
    " --device-memory to keep it resident"
)
_FP8_ROWS = "keys and values on the {} are rounded to fp8: the output is not exactly the model's"
_ROUNDED_DRAFT = (
    "the draft model is quantised to {} while it is loaded, for fewer streamed bytes per token;"
    " --draft-quantize none keeps its weights"
)


@dataclass(frozen=True)
class EngineSpec:
    """All decisions before loading, with the traffic of a pass over all stages of a pipeline."""

    target: TargetSpec
    draft: DraftSpec
    ranks: RanksSpec
    memory: MemoryPlan
    files: TargetFiles
    pass_bytes: PassBytes
    notice: str

    @property
    def plan(self) -> Plan:
        """Placement of all memory."""
        return self.memory.plan

    @property
    def device(self) -> torch.device:
        """Device of all models."""
        return self.target.device

    def noticed(self, notice: str) -> "EngineSpec":
        """Return the specification with a further notice, unless it is empty."""
        return replace(self, notice="\n".join(filter(None, (self.notice, notice))))


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting) -> EngineSpec:
    """Plan an engine. Raises CapacityError if the memory budgets are too small.

    For tensor parallelism with weights on disk, choose the faster division: some matrices by
    inputs, or all by outputs.
    """
    ranks = RanksSpec.from_config(config)
    spec = _plan(config, checkpoint, drafting, ranks)
    if config.pipeline > 1 or not ranks.any_reads_disk(spec.plan):
        return spec
    # A sidecar may exist for one division only.
    if not config.exact_parallel and config.link_format != "lossless":
        spec = _faster(spec, config, checkpoint, drafting)
    return spec.noticed(ranks.reading_notice(spec.target, spec.files))


def _faster(
    by_inputs: EngineSpec, config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting
) -> EngineSpec:
    """Choose between a plan and the plan with weights divided by outputs; close the slower."""
    ranks = by_inputs.ranks
    with ExitStack() as closes:
        closes.callback(by_inputs.files.close)
        try:
            by_outputs = _plan(config, checkpoint, drafting, replace(ranks, is_exact=True))
        except (CapacityError, UnsupportedModelError):  # on all ranks
            closes.pop_all()
            return by_inputs
        closes.callback(by_outputs.files.close)
        rate = partial(profile.memory_gbps, by_inputs.target.dtype.torch, by_inputs.device)
        gbps = rate(), rate(by_inputs.memory.limits.n_nodes)
        slower, faster = sorted(
            (by_inputs, by_outputs),
            key=lambda spec: -ranks.token_seconds(spec.target, spec.memory, spec.files.disk, gbps),
        )
        closes.pop_all()
    slower.files.close()
    link = faster.target.link
    if link.notice and slower.target.link.is_converted and not link.is_converted:
        notice = (
            "layers are read from the checkpoint: passes are faster so than from what offload-rt"
            " convert has written"
        )
        return replace(faster, notice=faster.notice.replace(link.notice, notice))
    return faster


def _plan(
    config: EngineConfig, whole: Checkpoint, drafting: Drafting, ranks: RanksSpec
) -> EngineSpec:
    device = pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        problem = "--host-memory is for pinned memory beside a GPU"
        raise SettingsError(problem, change="on a CPU, set --device-memory alone")
    dtype = compute_dtype(config.dtype, whole)
    budget = memory_budget(config, device, 1 if ranks.ranks is None else ranks.ranks.n_local)
    if config.pipeline > 1:
        checkpoint = ranks.stage(config, whole, drafting, dtype, budget)
    else:
        checkpoint = ranks.part(whole)
    checkpoint.format.arithmetic = _arithmetic(config, checkpoint, device, dtype.torch)
    mirrors = Mirrors.from_setting(config.mirror, checkpoint.layers)

    def plan_with(
        link: LinkFormat, images: tuple[BlockRecord, ...] = (), streams: bool = False
    ) -> EngineSpec:
        stored = replace(checkpoint, layers=link.layers or checkpoint.layers, images=images)
        target = TargetSpec(stored, dtype, device, link, mirrors, config.max_image_pixels, streams)
        return _planned(config, DraftSpec(drafting, target), budget, ranks)

    def plan_for(link: LinkFormat) -> EngineSpec:
        has_images = config.max_image_pixels > 0 and ranks.ranks is None
        images = checkpoint.image_blocks() if has_images else ()
        if not images:
            return plan_with(link)
        for streams in (False, True):
            with suppress(CapacityError):
                return plan_with(link, images, streams)
        return plan_with(link).noticed(_NO_ROOM)

    link = choose_link(config, checkpoint, device)
    try:
        return plan_for(link)
    except CapacityError as error:
        if config.link_format != "auto" or link.sidecar is None or ranks.ranks is not None:
            raise
        return plan_for(as_they_are(config, checkpoint, device, error.for_command_line))


def _arithmetic(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Arithmetic:
    """Return the arithmetic of products. Raises SettingsError if nothing can round its inputs."""
    rounds = config.activations == "int8"
    refused = partial(SettingsError, "--activations int8")
    matrices = (matrix for block in checkpoint.layers for matrix in block.matrices.values())
    if rounds and (device.type != "cpu" or dtype not in cpu.DTYPES):
        need = "a model on the CPU in 16 or 32 bits"
        have = f"{device.type} in {dtype}"
        raise refused(need=need, have=have, change="set --device and --dtype")
    if rounds and cpu.library() is None:
        need = "the CPU library, which is built with a C++ compiler"
        raise refused(need=need, have="none", change="remove it")
    if rounds and not any(matrix.has_integers for matrix in matrices):
        need = "weights of quantised GGUF types or int8"
        raise refused(need=need, have="none", change="remove it")
    return Arithmetic(config.torch_products, rounds)


def _planned(
    config: EngineConfig, draft: DraftSpec, budget: MemoryBudget, ranks: RanksSpec
) -> EngineSpec:
    target = draft.target
    budget = target.with_buffers(budget)

    def fit_sizes(sizes: Sizes | None, config: EngineConfig) -> MemoryPlan:
        return plan_memory(config, draft.drafting, (target.sizes, sizes), target.dtype, budget)

    def fit(draft: DraftSpec, config: EngineConfig = config) -> MemoryPlan:
        return fit_sizes(draft.sizes(), config)

    if ranks.ranks is None:
        planned = plan_draft(config, draft.sizes(), draft.can_round, budget.has_card, fit_sizes)
        memory = planned.memory
        draft = draft.rounded(planned.rounding)
    else:
        draft = draft.rounded(fixed_rounding(config, draft.sizes(), draft.can_round) or "none")
        choice = ranks.choose_draft(ranks.draft_options(draft), fit)
        draft = choice.draft
        max_len = choice.max_model_len or config.max_model_len
        n_nodes = choice.n_nodes or config.tree_size
        memory = fit(draft, replace(config, max_model_len=max_len, tree_size=n_nodes))
        if not choice.n_nodes:
            change = "lower --max-model-len or --tree-size"
            raise CapacityError("another rank has too little memory", change=change)
        limits = replace(memory.limits, fixed_size=config.tree_size is not None)
        memory = replace(memory, limits=limits)
    plan = memory.plan
    draft.check_placement(plan)
    target.check_placement(plan)
    files = target.open(plan, "disk" in plan.pass_bytes.at(memory.max_model_len))
    rounding = draft.drafting.rounding if config.draft_quantize == "auto" else "none"
    notices = (
        device_notice(config.device, target.device),
        target.checkpoint.format.notice,
        target.checkpoint.spec.notice,
        target.link.notice,
        _STREAMED_TOWER if target.streams_images else "",
        _FP8_ROWS.format(plan.kv_tier) if plan.split and plan.split.format.is_fp8 else "",
        _ROUNDED_DRAFT.format(rounding) if rounding != "none" else "",
        _lossless_notice(config, target, plan),
    )
    return EngineSpec(
        target, draft, ranks, memory, files, ranks.pass_bytes(plan),
        "\n".join(filter(None, notices)),
    )  # fmt: skip


def _lossless_notice(config: EngineConfig, target: TargetSpec, plan: Plan) -> str:
    checkpoint = target.checkpoint
    is_raw = config.link_format == "auto" and target.link.sizes is None and config.pipeline == 1
    empty = torch.empty(0, device=target.device)
    is_plain = checkpoint.format.name == "dense" and target.dtype.itemsize == 2
    if not (is_raw and is_plain and plan.on("host") and extension.serves(empty)):
        return ""
    link_gbps, memory_gbps = _gpu_rates(target)
    gain = lossless_gain(plan.pass_bytes, link_gbps, memory_gbps, LOSSLESS_SHARE)
    if gain < _LEAST_GAIN:
        return ""
    nbytes = int(LOSSLESS_SHARE * sum(layer.layout.nbytes for layer in checkpoint.layers))
    return (
        f"losslessly encoded layers would make a pass about {gain:.2f} times as fast: run"
        f" `offload-rt convert {config.model}` once, which writes about {format_size(nbytes)}"
    )


def _gpu_rates(target: TargetSpec) -> tuple[float, float]:
    link_gbps = profile.upload_gbps(target.device)
    memory_gbps = profile.memory_gbps(target.dtype.torch, target.device)
    torch.cuda.empty_cache()
    return link_gbps, memory_gbps

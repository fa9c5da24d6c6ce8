"""What is decided of an engine before a weight moves, from its settings."""

import os
import platform
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload_rt.config import EngineConfig, format_size
from offload_rt.cost.pass_times import PassBytes
from offload_rt.dtypes import DTYPES, DType
from offload_rt.engine import profile
from offload_rt.engine.draft_place import agree
from offload_rt.engine.link import LinkFormat, as_they_are, choose_link
from offload_rt.engine.memory_plan import (
    DRIVER,
    LIBRARIES,
    READ_BUFFERS,
    MemoryPlan,
    Sizes,
    less_margin,
    plan_touched,
)
from offload_rt.engine.rank_cuts import reading_notice, token_seconds
from offload_rt.engine.stages import of_all, stage_of
from offload_rt.errors import CapacityError, DeviceError, SettingsError, UnsupportedModelError
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.placement import ExpertSizes, MemoryBudget, Plan
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.ops import extension
from offload_rt.parallel.sharded_weights import divide
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.speculate.learner import learning_nbytes
from offload_rt.speculate.select import Drafting
from offload_rt.system.machine import cards, memory_free, memory_limit
from offload_rt.system.ranks import Ranks, joined
from offload_rt.weights import int4
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PAGE, BlockRecord, align_up


@dataclass(frozen=True)
class ExpertFiles:
    """A checkpoint whose experts are blocks of their own.

    rest     it without them
    records  of each expert, layer by layer
    tier     these, opened, to be read to where they are computed or, laid out as on a card, to the
             host beside it
    """

    rest: Checkpoint
    records: tuple[BlockRecord, ...]
    tier: DiskTier


@dataclass(frozen=True)
class EnginePlan(MemoryPlan):
    """All that is decided before a weight moves.

    disk    the target's layers, opened
    experts of the target that are no part of its layers; None: they are
    link    how those that are streamed come
    pass_bytes  what a pass moves, over all ranks of a pipeline
    notice  what the user should know of device and weights; empty if nothing
    """

    checkpoint: Checkpoint
    drafting: Drafting
    device: torch.device
    dtype: torch.dtype
    disk: DiskTier | SidecarTier
    link: LinkFormat
    pass_bytes: PassBytes
    notice: str
    experts: ExpertFiles | None = None

    @property
    def layers(self) -> Checkpoint:
        """The target, without experts that are no part of its layers."""
        return self.checkpoint if self.experts is None else self.experts.rest

    def close(self) -> None:
        """Close the files."""
        self.disk.close()
        if self.experts is not None:
            self.experts.tier.close()


def pick_device(name: str) -> torch.device:
    """Return the device of a setting. Raises DeviceError for cuda without a usable device.

    Builds the kernels: nvcc needs memory and all cores, and host memory is pinned later.
    """
    if name == "cuda" and not torch.cuda.is_available():
        need = "a CUDA device that torch can use"
        raise DeviceError(
            "--device cuda", need=need, have=_why_no_card(), change="use --device cpu"
        )
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    _expand_segments()
    extension.missing()
    return torch.device("cuda", torch.cuda.current_device())


def _expand_segments() -> None:
    """Let torch's blocks on the card grow, unless the user has set the allocator's variable or CUDA
    has begun.

    Otherwise what is left between blocks of varying sizes counts against a tight cap. Not in WSL,
    where the driver refuses such memory (pytorch/pytorch 192330).
    """
    has_begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch has no types there
    is_set = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    if not (has_begun or is_set or "microsoft" in platform.release().lower()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _why_no_card() -> str:
    """What torch says of a card that it cannot use: no driver, one that is too old, a build without
    CUDA.
    """
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch gives it no types
    except (RuntimeError, AssertionError) as error:
        return f"none ({str(error).splitlines()[0].split('. ')[0].rstrip('.')})"
    return "none"


def _notice(asked: str, device: torch.device) -> str:
    """Says so where a card is there and a CPU computes although nobody asked for it."""
    found = cards() if asked == "auto" and device.type == "cpu" else []
    if not found:
        return ""
    return (
        f"computing on the CPU: there is a {found[0]}, but torch can use {_why_no_card()}; --device"
        " cpu if that is meant"
    )


def _kv_notice(plan: Plan) -> str:
    """Says so where the output is not exactly the model's."""
    if plan.split is None or not plan.split.format.is_fp8:
        return ""
    return (
        f"keys and values on the {plan.kv_tier} are rounded to fp8: the output is not exactly the"
        " model's"
    )


def plan_engine(config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting) -> EnginePlan:
    """Decide where everything goes. Raises CapacityError if it cannot go anywhere.

    Where weights of ranks come from a disk, some of them are divided by inputs or all by outputs,
    whichever is faster.
    """
    ranks = joined()
    found = _plan(config, checkpoint, drafting)
    if ranks is None or config.pipeline > 1 or ranks.least(int("disk" not in found.plan.tiers))[0]:
        return found
    # which may be there for one way alone
    if not config.exact_parallel and config.link_format != "lossless":
        found = _faster(found, config, checkpoint, drafting)
    notices = found.notice, reading_notice(found, ranks.size, config.exact_parallel)
    return replace(found, notice="\n".join(filter(None, notices)))


def _faster(
    found: EnginePlan, config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting
) -> EnginePlan:
    """The faster one of a plan and that for weights divided by outputs; the other is closed."""
    with ExitStack() as closes:
        closes.callback(found.close)
        try:
            by_outputs = _plan(replace(config, exact_parallel=True), checkpoint, drafting)
        except (CapacityError, UnsupportedModelError):  # on all ranks
            closes.pop_all()
            return found
        closes.callback(by_outputs.close)
        gbps = [
            profile.memory_gbps(found.dtype, found.device, n) for n in (1, found.limits.n_nodes)
        ]
        slower, faster = sorted((found, by_outputs), key=lambda one: -token_seconds(one, gbps))
        closes.pop_all()
    slower.close()
    is_read = faster.link.sidecar or faster.link.layers
    if faster.link.notice and not is_read and (slower.link.sidecar or slower.link.layers):
        left = (
            "layers are read from the checkpoint: passes are faster so than from what offload-rt"
            " convert has written"
        )
        return replace(faster, notice=faster.notice.replace(faster.link.notice, left))
    return faster


def _plan(config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting) -> EnginePlan:
    """Decide it for weights that are divided as the settings say."""
    device = pick_device(config.device)
    if device.type == "cpu" and config.host_memory is not None:
        problem = "--host-memory is for pinned memory beside a GPU"
        raise SettingsError(problem, change="on a CPU, set --device-memory alone")
    ranks = joined()
    dtype = _pick_dtype(config.dtype, checkpoint)
    budget = memory_budget(config, device)
    checkpoint = _of_rank(config, checkpoint, drafting, dtype, budget)
    checkpoint.format.is_batch_invariant = config.batch_invariant
    link = choose_link(config, checkpoint, device)
    parts = checkpoint, drafting, dtype, budget, device
    try:
        return _placed(config, link, *parts)
    except CapacityError as error:
        if config.link_format != "auto" or link.sidecar is None or ranks is not None:
            raise
        return _placed(config, as_they_are(config, checkpoint, device, str(error)), *parts)


def _placed(
    config: EngineConfig, link: LinkFormat, checkpoint: Checkpoint, drafting: Drafting,
    dtype: DType, budget: MemoryBudget,
    device: torch.device,
) -> EnginePlan:  # fmt: skip
    """Place the model for one way over the link."""
    ranks = joined()
    if link.layers:
        checkpoint = replace(checkpoint, layers=link.layers)
    experts: ExpertFiles | None = None
    with closing(DiskTier(checkpoint.layers)) as files:
        is_packed = device.type == "cuda" or link.sizes is not None
        layer_nbytes = _layer_nbytes(checkpoint, files, is_packed)
        if link.encodes:  # a layer is read whole before it is encoded
            budget = replace(budget, buffers=budget.buffers + max(_packed_nbytes(checkpoint)))
        target = replace(
            Sizes.of_checkpoint(checkpoint, dtype), layer_nbytes=layer_nbytes, link=link.sizes
        )
        touched = partial(_divided, checkpoint, target, is_packed)

        def fit(way: Drafting, config: EngineConfig = config) -> MemoryPlan:
            draft = _draft_sizes(checkpoint, way, dtype, device)
            return plan_touched(config, way, (target, draft), touched, dtype, budget)

        if ranks is None:
            memory = fit(drafting)
        else:
            way = agree(_ways(config, drafting), fit, files, ranks, (dtype, device))
            drafting = way.drafting
            max_len = way.max_model_len or config.max_model_len
            n_nodes = way.n_nodes or config.tree_size
            memory = fit(drafting, replace(config, max_model_len=max_len, tree_size=n_nodes))
            if not way.n_nodes:
                raise CapacityError(
                    "another rank has too little memory",
                    change="lower --max-model-len or --tree-size",
                )
            memory = replace(
                memory, limits=replace(memory.limits, fixed_size=config.tree_size is not None)
            )
        _check_resident(memory.plan, drafting)
        if link.encodes and memory.plan.tiers.count("disk"):
            raise CapacityError(
                "layers that stay on the disk are not encoded as they are loaded",
                have=f"{memory.plan.tiers.count('disk')} of them",
                change=(
                    "run offload-rt convert first, raise --host-memory, or use --link-format raw"
                ),
            )
        reads_disk = "disk" in memory.plan.pass_bytes.at(memory.max_model_len)
        settings = profile.read_settings(checkpoint.layers) if reads_disk else files.settings
    disk: DiskTier | SidecarTier
    if memory.plan.experts is not None and (divided := checkpoint.by_expert()) is not None:
        disk = DiskTier(divided[0].layers, settings)
        experts = ExpertFiles(
            *divided, DiskTier(divided[1], settings, packed=device.type == "cuda")
        )
    elif link.sidecar:
        disk = SidecarTier(link.sidecar, settings, decodes=device.type == "cpu")
    else:
        disk = DiskTier(checkpoint.layers, settings)
    moved = memory.plan.pass_bytes
    if ranks is not None and config.pipeline > 1:
        moved = of_all(memory.plan, ranks)
    of_weights = checkpoint.format.notice, checkpoint.spec.notice, link.notice
    return EnginePlan(
        memory.plan, memory.limits, memory.max_model_len, memory.cache_rows, memory.view_rows,
        memory.n_sequences,
        checkpoint, drafting, device, dtype.torch, disk, link, moved,
        "\n".join(filter(None,
            (_notice(config.device, device), *of_weights, _kv_notice(memory.plan)))), experts,
    )  # fmt: skip


def _of_rank(
    config: EngineConfig, whole: Checkpoint, drafting: Drafting, dtype: DType, budget: MemoryBudget
) -> Checkpoint:
    """The part of a checkpoint that this rank has. Raises an OffloadError where it cannot be
    divided as is asked for.
    """
    ranks = joined()
    if config.pipeline > 1:
        return replace(stage_of(config, whole, drafting, dtype, budget), whole=whole)
    return whole if ranks is None else _part(config, whole, ranks)


def _part(config: EngineConfig, whole: Checkpoint, ranks: Ranks) -> Checkpoint:
    divided = divide(whole, TensorParallelModel.of(whole.spec, ranks, config.exact_parallel))
    return replace(divided, whole=whole)


def _ways(config: EngineConfig, drafting: Drafting) -> list[Drafting]:
    """What this rank may draft with: all of a draft model on rank 0 and nothing elsewhere, or a
    part of it.

    Raises an OffloadError where it is to be divided and cannot.
    """
    ranks = joined()
    draft = drafting.draft
    split = config.split_draft
    if ranks is None or draft is None:
        return [drafting]
    is_one = bool(draft.spec.taps) or drafting.learning != "off" or config.pipeline > 1
    if is_one and split == "on":
        need = "a whole draft model that does not learn, and no --pipeline"
        raise SettingsError("--split-draft on", need=need, change="leave it out")
    whole = drafting if ranks.rank == 0 else replace(drafting, draft=None, learning="off")
    if is_one or split == "off":
        return [whole]
    part = None
    try:
        part = _part(config, draft, ranks)
    except UnsupportedModelError:
        if split == "on":
            raise
    if not ranks.least(part is not None)[0]:
        return [whole]
    divided = replace(drafting, draft=part)
    return [divided] if split == "on" else [whole, divided]


def _divided(checkpoint: Checkpoint, whole: Sizes, is_packed: bool) -> Sizes | None:
    """Of a model with its experts as blocks of their own; None where they cannot be, or layers come
    encoded.
    """
    divided = checkpoint.by_expert()
    mixture = checkpoint.spec.mixture
    if divided is None or mixture is None or whole.link is not None:
        return None
    with (
        closing(DiskTier(divided[1], packed=is_packed)) as experts,
        closing(DiskTier(divided[0].layers)) as rest,
    ):
        nbytes = max(experts.layout(i).nbytes for i in range(len(divided[1])))
        layers = _layer_nbytes(divided[0], rest, is_packed)
    return replace(whole, layer_nbytes=layers, experts=ExpertSizes(mixture, nbytes))


def _layer_nbytes(
    checkpoint: Checkpoint, disk: DiskTier | SidecarTier, is_packed: bool
) -> tuple[int, ...]:
    """Bytes of layers as they lie in files, or also packed: only slots on the host hold layers as
    they lie in files.
    """
    found = (disk.layout(i).nbytes for i in range(checkpoint.spec.n_layers))
    return tuple(map(max, found, _packed_nbytes(checkpoint))) if is_packed else tuple(found)


def _packed_nbytes(checkpoint: Checkpoint) -> list[int]:
    return [align_up(layer.layout.nbytes, PAGE) for layer in checkpoint.layers]


def _draft_sizes(
    checkpoint: Checkpoint, drafting: Drafting, dtype: DType, device: torch.device
) -> Sizes | None:
    """Of what drafts: another model, or copies of the target's layers; None where neither does."""
    draft = drafting.draft
    of_type = drafting.type
    learning = 0
    if drafting.learning != "off":
        can_learn = of_type.resources.needs_model and of_type.resources.view is None
        if draft is None or not (
            can_learn and draft.spec.supports_training and draft.format.name == "dense"
        ):
            need = (
                "unquantised weights of a whole draft model, of a native family, and trees by it"
                " alone"
            )
            raise SettingsError(
                "--learn-draft", need=need, change="leave it out, or give such a --draft-model"
            )
        learning = learning_nbytes(draft.spec, draft.dtype, device)
    if draft is not None:
        sizes = Sizes.of_checkpoint(draft, drafting.draft_dtype(dtype))
        return replace(sizes, view_nbytes=sizes.view_nbytes + learning)
    if not drafting.type.resources.copies_target:
        return None
    if checkpoint.format.name != "dense":
        have = f"weights of format {checkpoint.format.name}"
        change = "leave it out, or give a draft model"
        raise SettingsError(
            f"--drafter {drafting.name}", need="unquantised weights", have=have, change=change
        )
    spec = checkpoint.spec
    view_nbytes = Sizes.of_checkpoint(checkpoint, int4.DTYPE).view_nbytes
    stand_in = max(
        int4.copy_layout(layer.layout, device.type == "cuda").nbytes for layer in checkpoint.layers
    )
    return Sizes(spec, (0,) * spec.n_layers, 0, int4.DTYPE, view_nbytes, stand_in)


def _check_resident(plan: Plan, drafting: Drafting) -> None:
    """Raises CapacityError where the target is to draft itself and its layers do not stay: a draft
    would take a whole pass.
    """
    n_streamed = len(plan.tiers) - plan.tiers.count("device")
    if drafting.type.resources.view is not None and n_streamed:
        raise CapacityError(
            f"--drafter "
            f"{drafting.name}", need="all layers on the "
                                     "device", have=f"{n_streamed} of {len(plan.tiers)} elsewhere",
            change="raise --device-memory, or use another drafter",
        )  # fmt: skip


def _pick_dtype(name: str, checkpoint: Checkpoint) -> DType:
    return DTYPES[(checkpoint.spec.dtype_name or checkpoint.dtype) if name == "auto" else name]


def memory_budget(config: EngineConfig, device: torch.device) -> MemoryBudget:
    """The settings, or what is free, less a margin. Raises CapacityError for more than there is."""
    ranks = joined()
    spare = less_margin(memory_free()) // (ranks.n_local if ranks else 1)
    if device.type == "cpu":
        return MemoryBudget(_within(config.device_nbytes, "--device-memory", spare, memory_limit()))
    torch.cuda.empty_cache()  # what an engine that was closed has left to torch is free as well
    on_card, _ = torch.cuda.mem_get_info(device)  # without the context of this process
    of_card = _within(
        config.device_nbytes, "--device-memory", less_margin(on_card), max(on_card - DRIVER, 0)
    )
    of_host = _within(config.host_nbytes, "--host-memory", spare, memory_limit())
    return MemoryBudget(of_card, of_host, LIBRARIES, has_card=True, buffers=READ_BUFFERS)


def _within(asked: int | None, flag: str, default: int, limit: int) -> int:
    if asked is not None and asked > limit:
        need = format_size(asked)
        have = format_size(limit)
        raise CapacityError(
            f"{flag} is more than there is", need=need, have=have, change=f"lower {flag}"
        )
    return default if asked is None else asked

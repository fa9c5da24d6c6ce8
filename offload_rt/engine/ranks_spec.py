"""Specification of the ranks: parts of models, draft placement, common plans, remote calls."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import (
    ComputeTimes,
    MachineProfile,
    PassBytes,
    TouchedExperts,
    pass_time,
    pass_times,
    transfer_s,
)
from offload_rt.cost.tree_size import Acceptance, select_tree
from offload_rt.dtypes import DType
from offload_rt.engine import profile
from offload_rt.engine.draft_spec import DraftSpec
from offload_rt.engine.link import convert_command
from offload_rt.engine.memory_plan import SHORTEST_CONTEXT, MemoryPlan, reserved_memory
from offload_rt.engine.model_sizes import Sizes
from offload_rt.engine.target_spec import TargetFiles, TargetSpec
from offload_rt.errors import CapacityError, SettingsError, UnsupportedModelError
from offload_rt.executor.rank_runner import RankRunner
from offload_rt.executor.runner import Runner
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.parallel.pipeline_model import Stage, divide_layers, divisible
from offload_rt.parallel.sharded_weights import divide
from offload_rt.parallel.tensor_parallel import SharedWeights, TensorParallelModel
from offload_rt.speculate.select import Drafting
from offload_rt.system.ranks import Ranks, joined
from offload_rt.tree.search import search
from offload_rt.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class DraftChoice:
    """A draft placement on this rank, and the smallest values of all ranks.

    memory         this rank's memory plan; None if it does not fit
    max_model_len  0 if it does not fit on some rank; likewise n_nodes
    is_in_memory   no rank reads from disk
    """

    draft: DraftSpec
    memory: MemoryPlan | None
    max_model_len: int
    n_nodes: int
    is_in_memory: int


@dataclass(frozen=True)
class RanksSpec:
    """The ranks of a run and their division of the models.

    pipeline  number of stages; 1 for tensor parallelism
    is_exact  shard all matrices by outputs, for results that equal a single process
    """

    ranks: Ranks | None
    pipeline: int
    is_exact: bool
    split_draft: str

    @classmethod
    def from_config(cls, config: EngineConfig) -> "RanksSpec":
        """Join the process group; all ranks call this together."""
        return cls(joined(), config.pipeline, config.exact_parallel, config.split_draft)

    # Parts of the models

    def part(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return this rank's shard. Raises UnsupportedModelError for indivisible weights."""
        if self.ranks is None:
            return checkpoint
        model = TensorParallelModel.for_rank(checkpoint.spec, self.ranks, self.is_exact)
        return replace(divide(checkpoint, model), whole=checkpoint)

    def stage(
        self, config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting, dtype: DType,
        budget: MemoryBudget,
    ) -> Checkpoint:  # fmt: skip
        """Return this rank's pipeline stage, equalizing the fill level of all ranks.

        Device memory decides if it fits all layers, otherwise device plus host memory.
        Raises SettingsError if ranks or drafter do not support a pipeline.
        """
        ranks = self._pipeline_ranks(checkpoint, drafting)
        parts = divisible(checkpoint.spec)
        sizes = Sizes.of_checkpoint(checkpoint, dtype)
        n_rows = config.max_model_len or SHORTEST_CONTEXT
        whole = _stage(checkpoint, range(checkpoint.spec.n_layers), ranks)
        target = replace(sizes, non_layer_nbytes=Sizes.of_checkpoint(whole, dtype).non_layer_nbytes)
        draft = None
        if drafting.draft is not None:
            draft = Sizes.of_checkpoint(drafting.draft, drafting.draft_dtype(dtype))
        n_nodes = config.tree_size or 1
        reserved = reserved_memory(target, draft, dtype, budget.has_card, n_rows, n_nodes)
        on_device = max(budget.device - reserved.total + reserved.cache - budget.libraries, 1)
        with_host = on_device + max(budget.host - budget.buffers, 0)
        rooms = ranks.all_gather(torch.tensor([[on_device, with_host]])).view(-1, 2)
        held = _held_nbytes(sizes, parts, n_rows, dtype)
        device_rooms, all_rooms = rooms.T.tolist()
        is_resident = sum(device_rooms) >= sum(held)
        owned = divide_layers(held, device_rooms if is_resident else all_rooms)[ranks.rank]
        layers = range(parts[owned.start].start, parts[owned.stop - 1].stop)
        return replace(_stage(checkpoint, layers, ranks), whole=checkpoint)

    def _pipeline_ranks(self, checkpoint: Checkpoint, drafting: Drafting) -> Ranks:
        ranks = self.ranks
        n_parts = len(divisible(checkpoint.spec))
        if ranks is None or ranks.size != self.pipeline or self.pipeline > n_parts:
            need = "as many ranks, and at least as many layers"
            have = f"{ranks.size if ranks else 1} started, and {checkpoint.spec.n_layers} layers"
            change = "start it by `torchrun --nproc-per-node N --nnodes M`"
            raise SettingsError(f"--pipeline={self.pipeline}", need=need, have=have, change=change)
        if drafting.reads_target:
            problem = f"--drafter={drafting.name} with --pipeline"
            need = "a drafter that uses only the model's logits"
            raise SettingsError(problem, need=need, change="use another drafter")
        return ranks

    def pass_bytes(self, plan: Plan) -> PassBytes:
        """Return the traffic of all stages; CapacityError for off-device rows in a pipeline."""
        if self.ranks is None or self.pipeline == 1:
            return plan.pass_bytes
        if plan.split is not None:
            problem = "a pipeline keeps keys and values on its devices, with two slots for layers"
            raise CapacityError(problem, change="raise --device-memory, or lower --max-model-len")
        return _total_pass_bytes(plan, self.ranks)

    # Placement of the draft model

    def draft_options(self, draft: DraftSpec) -> list[DraftSpec]:
        """Return the possible drafts of this rank: the whole model on rank 0, or a shard.

        Raises SettingsError or UnsupportedModelError if a required shard is impossible.
        """
        ranks = self.ranks
        drafting = draft.drafting
        if ranks is None or drafting.draft is None:
            return [draft]
        is_learning = drafting.learning != "off"
        must_be_whole = bool(drafting.draft.spec.taps) or is_learning or self.pipeline > 1
        if must_be_whole and self.split_draft == "on":
            need = "a whole draft model that does not learn, and no --pipeline"
            raise SettingsError("--split-draft=on", need=need, change="leave it out")
        nothing = replace(drafting, draft=None, learning="off")
        whole = replace(draft, drafting=drafting if ranks.rank == 0 else nothing)
        if must_be_whole or self.split_draft == "off":
            return [whole]
        shard = None
        with suppress(*(() if self.split_draft == "on" else (UnsupportedModelError,))):
            shard = self.part(drafting.draft)
        if not ranks.least(shard is not None)[0]:
            return [whole]
        sharded = replace(draft, drafting=replace(drafting, draft=shard))
        return [sharded] if self.split_draft == "on" else [whole, sharded]

    def choose_draft(
        self, options: Sequence[DraftSpec], fit: Callable[[DraftSpec], MemoryPlan]
    ) -> DraftChoice:
        """Choose the draft placement with the fastest step on the slowest rank.

        fit  returns this rank's memory plan, or raises CapacityError
        Options without disk traffic have priority. A step drafts the deepest tree, in equal levels.
        """
        assert self.ranks is not None, "a single process has a single option"
        choices = []
        for draft in options:
            plan = None
            values = 0, 0, False
            with suppress(CapacityError):
                plan = fit(draft)
                values = plan.max_model_len, plan.limits.n_nodes, "disk" not in plan.plan.tiers
            choices.append(DraftChoice(draft, plan, *map(int, self.ranks.least(*values))))
        fitting = (
            [choice for choice in choices if choice.is_in_memory]
            or [choice for choice in choices if choice.n_nodes]
            or choices[-1:]
        )
        if len(fitting) == 1:
            return fitting[0]
        steps_s = self.ranks.least(*(-seconds for seconds in _step_seconds(fitting)))
        return fitting[steps_s.index(max(steps_s))]

    # Division of weights on disk

    def any_reads_disk(self, plan: Plan) -> bool:
        """Return whether some rank streams layers from disk."""
        return self.ranks is not None and not self.ranks.least("disk" not in plan.tiers)[0]

    def token_seconds(
        self, target: TargetSpec, memory: MemoryPlan, disk: Any, product_gbps: Sequence[float]
    ) -> float:
        """Return the seconds per token on the slowest rank, with the best tree of a fair draft.

        All ranks call this together. Reading includes gaps between parts of rows, and decoding.
        product_gbps  rates of products with one row, and with the rows of the largest tree
        """
        model = target.checkpoint.spec
        limits = memory.limits
        assert isinstance(model, TensorParallelModel), "weights are sharded"
        times = _compute_times(target, model, limits.n_nodes, product_gbps)
        links = (("disk", profile.link_gbps(disk, model.n_layers)),)
        nbytes = sum(disk.nbytes(i) for i, tier in enumerate(memory.plan.tiers) if tier == "disk")
        machine = MachineProfile(links, product_gbps[0], compute=times)

        def slowest_s(sizes: np.ndarray) -> np.ndarray:
            seconds = pass_times(machine, PassBytes((("disk", nbytes),), 0), sizes, 0)
            return -np.array(model.ranks.least(*(-seconds).tolist()))[:, None]

        trees = search(Acceptance().by_rank(), limits.n_nodes, limits.n_levels)
        return select_tree(trees.values, limits, slowest_s).token_s

    @staticmethod
    def reading_notice(target: TargetSpec, files: TargetFiles) -> str:
        """Return a notice if reading the shards from disk wastes much bandwidth."""
        disk = files.disk
        layers = range(target.checkpoint.spec.n_layers)
        needed = sum(map(disk.nbytes, layers))
        read = sum(map(disk.read_nbytes, layers)) if isinstance(disk, DiskTier) else needed
        if read < 1.1 * needed:
            return ""
        return (
            "layers are read from the disk with gaps between a rank's parts, in"
            f" {read / needed:.1f} times their bytes; {convert_command(target.checkpoint.spec)}"
            " writes files without it"
        )

    # Computation

    def shared_weights(self, runner: Runner, device: torch.device) -> Any:
        """Return the target's weights outside the layers, as a draft head on rank 0 uses them."""
        if isinstance(runner.spec, TensorParallelModel):
            return SharedWeights(runner.non_layer, runner.spec, device)
        return runner.non_layer

    def compute_together(self, objects: Sequence[Any], closes: ExitStack) -> None:
        """Repeat rank 0's calls on further ranks, which exit when `closes` ends."""
        if (ranks := self.ranks) is None:
            return
        ranks.has_begun = True
        if ranks.rank > 0:
            for number, method, args, kwargs in ranks.told():
                getattr(objects[number], method)(*args, **kwargs)
            raise SystemExit
        closes.callback(ranks.leave)
        for number, shared in enumerate(objects):
            if isinstance(shared, SharedWeights | RankRunner):
                shared.send = partial(ranks.telling, number)


def _stage(checkpoint: Checkpoint, layers: range, ranks: Ranks) -> Checkpoint:
    """Return the checkpoint of some layers, with this rank's tensors outside the layers."""
    stage = Stage.for_rank(checkpoint.spec, layers, ranks)
    is_all = stage.rank == 0 or stage.embeds_on_all_stages
    non_layer = checkpoint.non_layer.select(lambda tensor: is_all or len(tensor.shape) == 1)
    owned = checkpoint.layers[layers.start : layers.stop]
    return replace(checkpoint, spec=stage, layers=owned, non_layer=non_layer)


def _held_nbytes(sizes: Sizes, parts: Sequence[range], n_rows: int, dtype: DType) -> list[int]:
    """Return the bytes of layers, KV rows and states per indivisible part of a model."""
    spec = sizes.spec
    state_nbytes = sum(shape.nbytes(dtype.itemsize) for shape in spec.state_shapes[:1])

    def layer_nbytes(i: int) -> int:
        n_numbers = sum(spec.kv_shapes[n].n_numbers for n in spec.kv_layers(i))
        states = state_nbytes * (i in spec.state_layers)
        return sizes.layer_nbytes[i] + n_rows * n_numbers * dtype.itemsize + states

    return [sum(map(layer_nbytes, part)) for part in parts]


def _total_pass_bytes(plan: Plan, ranks: Ranks) -> PassBytes:
    stage = plan.pass_bytes
    tiers, sizes = zip(*stage.streamed, strict=True)
    *streamed, computed, ahead = map(int, ranks.total(*sizes, stage.computed, stage.ahead))
    touched = plan.touched or TouchedExperts(plan.kv_tier, 0, 0, 0, 0)
    per_layer = 1, touched.n_experts, touched.n_used, touched.nbytes, touched.n_resident
    n, *sums = ranks.total(*(value * touched.n_layers for value in per_layer))
    experts = None
    if n:
        n_experts, n_used, nbytes = (round(value / n) for value in sums[:3])
        experts = TouchedExperts(touched.tier, int(n), n_experts, n_used, nbytes, sums[3] / n)
    return PassBytes(tuple(zip(tiers, streamed, strict=True)), computed, ahead, experts=experts)


def _step_seconds(choices: Sequence[DraftChoice]) -> list[float]:
    """Measure the seconds of drafting and verifying the deepest tree, per draft placement."""
    fitting = [(choice, choice.memory) for choice in choices if choice.memory]
    drafting_s = []
    for choice, memory in fitting:
        n_levels = memory.limits.n_levels
        level_s = choice.draft.level_seconds(-(-choice.n_nodes // n_levels))
        drafting_s.append((n_levels - 1) * level_s)
    torch.cuda.empty_cache()
    target = choices[0].draft.target
    machine = MachineProfile((), 1.0)
    if any(not memory.plan.is_resident for _, memory in fitting):
        with closing(DiskTier(target.checkpoint.layers)) as files:
            disk = profile.link_gbps(files, 1)
        gbps = profile.memory_gbps(target.dtype.torch, target.device)
        # Without a GPU host and device are the same memory.
        host = gbps if target.device.type == "cpu" else profile.upload_gbps(target.device)
        machine = MachineProfile((("disk", disk), ("host", host)), gbps)
    return [
        pass_time(machine, memory.plan.pass_bytes, choice.n_nodes, between_s=seconds)
        for seconds, (choice, memory) in zip(drafting_s, fitting, strict=True)
    ]


def _compute_times(
    target: TargetSpec, model: TensorParallelModel, n_nodes: int, product_gbps: Sequence[float]
) -> ComputeTimes:
    """Compute times of a sharded model: products at given rates, and measured exchanges."""
    exchanges = Counter(exchange for i in range(model.n_layers) for exchange in model.exchanges(i))
    widths = sorted({1, n_nodes})
    dtype = target.dtype.torch
    seconds = list[float]()
    for n_rows, gbps in zip(widths, product_gbps, strict=False):
        n_weights = sum(model.flops(i, n_rows, 0) for i in range(model.n_layers)) / 2 / n_rows
        width_s = transfer_s(n_weights * dtype.itemsize, gbps)
        for (adds, width), n in sorted(exchanges.items()):
            x = torch.zeros(n_rows, width, dtype=dtype, device=target.device)
            collective = model.ranks.all_reduce if adds else model.ranks.all_gather
            width_s += n * min(profile.timed(target.device, partial(collective, x)))
        seconds.append(width_s)
    return ComputeTimes(tuple(widths), (0,), (tuple(seconds),))

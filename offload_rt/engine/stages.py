"""Division of layers into pipeline stages, and the total traffic of all stages."""

from dataclasses import replace

import torch

from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import PassBytes, TouchedExperts
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import SHORTEST_CONTEXT, Sizes, reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.parallel.pipeline_model import Stage, divide_layers, divisible
from offload_rt.speculate.select import Drafting
from offload_rt.system.ranks import Ranks, joined
from offload_rt.weights.checkpoint import Checkpoint


def stage_of(
    config: EngineConfig,
    checkpoint: Checkpoint,
    drafting: Drafting,
    dtype: DType,
    budget: MemoryBudget,
) -> Checkpoint:
    """Select this rank's part of a checkpoint, equalizing the fill level of all ranks.

    Device memory decides if it fits all layers, otherwise device plus host memory.
    Raises SettingsError if ranks, drafter or link do not support a pipeline.
    """
    ranks = joined()
    spec = checkpoint.spec
    if (
        ranks is None
        or ranks.size != config.pipeline
        or config.pipeline > len(parts := divisible(spec))
    ):
        n_ranks = ranks.size if ranks else 1
        have = f"{n_ranks} started, and {spec.n_layers} layers in {len(divisible(spec))} parts"
        change = "start it by torchrun, with --nproc-per-node and --nnodes"
        raise SettingsError(
            f"--pipeline {config.pipeline}", need="as many ranks", have=have, change=change
        )
    if drafting.reads_target:
        need = "a drafter that uses only the model's logits"
        problem = f"--drafter {drafting.name} with --pipeline"
        raise SettingsError(problem, need=need, change="use another drafter")
    sizes = Sizes.of_checkpoint(checkpoint, dtype)
    n_rows = config.max_model_len or SHORTEST_CONTEXT
    stage = _part(checkpoint, range(spec.n_layers), ranks)
    draft = (
        Sizes.of_checkpoint(drafting.draft, drafting.draft_dtype(dtype)) if drafting.draft else None
    )
    stage_sizes = replace(
        sizes, non_layer_nbytes=Sizes.of_checkpoint(stage, dtype).non_layer_nbytes
    )
    reserved = reserved_memory(stage_sizes, draft, dtype, n_rows, config.tree_size or 1)
    on_device = max(budget.device - reserved.total + reserved.cache - budget.libraries, 1)
    with_host = on_device + max(budget.host - budget.buffers, 0)
    rooms = ranks.all_gather(torch.tensor([[on_device, with_host]])).view(-1, 2)
    kv = [
        sum(spec.kv_shapes[n].n_numbers for n in spec.kv_layers(i)) * dtype.itemsize
        for i in range(spec.n_layers)
    ]
    state_nbytes = sum(shape.nbytes(dtype.itemsize) for shape in spec.state_shapes[:1])
    held = [
        sum(
            sizes.layer_nbytes[i] + n_rows * kv[i] + (state_nbytes if i in spec.state_layers else 0)
            for i in part
        )
        for part in parts
    ]
    device_rooms, all_rooms = rooms.T.tolist()
    rooms_used = device_rooms if sum(device_rooms) >= sum(held) else all_rooms
    owned = divide_layers(held, rooms_used)[ranks.rank]
    return _part(checkpoint, range(parts[owned.start].start, parts[owned.stop - 1].stop), ranks)


def _part(checkpoint: Checkpoint, layers: range, ranks: Ranks) -> Checkpoint:
    """Return the checkpoint of some layers, with this rank's tensors outside the layers."""
    stage = Stage.of(checkpoint.spec, layers, ranks)
    is_all = stage.rank == 0 or stage.embeds_on_all_stages
    non_layer = checkpoint.non_layer.select(lambda tensor: is_all or len(tensor.shape) == 1)
    return replace(
        checkpoint,
        spec=stage,
        layers=checkpoint.layers[layers.start : layers.stop],
        non_layer=non_layer,
    )


def of_all(plan: Plan, ranks: Ranks) -> PassBytes:
    """Sum the traffic of all ranks' passes. Raises CapacityError for off-device KV rows."""
    if plan.split is not None:
        change = "raise --device-memory, or lower --max-model-len"
        problem = "a pipeline keeps keys and values on its devices, with two slots for layers"
        raise CapacityError(problem, change=change)
    tiers, nbytes_streamed = zip(*plan.pass_bytes.streamed, strict=True)
    totals = ranks.total(*nbytes_streamed, plan.pass_bytes.computed, plan.pass_bytes.ahead)
    *streamed, computed, ahead = map(int, totals)
    touched = plan.touched
    tier = "host" if plan.budget.has_card else "disk"
    per_layer: tuple[float, ...] = (0,) * 5
    if touched:
        per_layer = 1, touched.n_experts, touched.n_used, touched.nbytes, touched.n_resident
    n_layers = touched.n_layers if touched else 0
    n, *sums = ranks.total(*(value * n_layers for value in per_layer))
    experts = None
    if n:
        n_experts, n_used, nbytes = (round(value / n) for value in sums[:3])
        experts = TouchedExperts(tier, int(n), n_experts, n_used, nbytes, sums[3] / n)
    return PassBytes(tuple(zip(tiers, streamed, strict=True)), computed, ahead, experts=experts)

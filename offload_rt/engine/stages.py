"""The layers that each rank of a pipeline has, and what their passes move together."""

from dataclasses import replace

import torch

from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.engine.memory_plan import SHORTEST_CONTEXT, Sizes, reserved_memory
from offload_rt.errors import CapacityError, SettingsError
from offload_rt.models.stage import Stage, divide_layers, divisible
from offload_rt.offload.placement import MemoryBudget, Plan
from offload_rt.speculate.select import Drafting
from offload_rt.system.machine import PassBytes, TouchedExperts
from offload_rt.system.ranks import Ranks, joined
from offload_rt.weights.checkpoint import Checkpoint


def stage_of(
    config: EngineConfig, checkpoint: Checkpoint, drafting: Drafting, dtype: DType, budget: MemoryBudget
) -> Checkpoint:
    """The part of a checkpoint that this rank has, so that all ranks are as full as each other.

    They are filled on their devices where all layers fit there, else on host and device together.
    Raises SettingsError where ranks, drafter or link are not those of a pipeline.
    """
    ranks, spec = joined(), checkpoint.spec
    if ranks is None or ranks.size != config.pipeline or config.pipeline > len(parts := divisible(spec)):
        have = f"{ranks.size if ranks else 1} of them, and {spec.n_layers} layers in {len(divisible(spec))} parts"
        change = "start it by torchrun, with --nproc-per-node and --nnodes"
        raise SettingsError(f"--pipeline {config.pipeline}", need="as many ranks", have=have, change=change)
    reads_more = drafting.type.view is not None or drafting.type.drafts_by_copy
    if reads_more or (drafting.draft is not None and drafting.draft.spec.taps):
        need = "a drafter that needs nothing but the model's logits"
        raise SettingsError(f"--drafter {drafting.name} with --pipeline", need=need, change="use another drafter")
    sizes, n_rows = Sizes.of_checkpoint(checkpoint, dtype), config.max_model_len or SHORTEST_CONTEXT
    stage = _part(checkpoint, range(spec.n_layers), ranks)
    draft = Sizes.of_checkpoint(drafting.draft, drafting.draft_dtype(dtype)) if drafting.draft else None
    own = replace(sizes, non_layer_nbytes=Sizes.of_checkpoint(stage, dtype).non_layer_nbytes)
    reserved = reserved_memory(own, draft, dtype, n_rows, config.tree_size or 1)
    on_device = max(budget.device - reserved.total + reserved.cache - budget.libraries, 1)
    rooms = ranks.all_gather(torch.tensor([[on_device, on_device + max(budget.host - budget.buffers, 0)]])).view(-1, 2)
    kv = [sum(spec.kv_shapes[n].n_numbers for n in spec.kv_layers(i)) * dtype.itemsize for i in range(spec.n_layers)]
    of_state = sum(one.nbytes(dtype.itemsize) for one in spec.state_shapes[:1])
    held = [
        sum(sizes.layer_nbytes[i] + n_rows * kv[i] + (of_state if i in spec.state_layers else 0) for i in part)
        for part in parts
    ]
    of_devices, of_all = rooms.T.tolist()
    of_rank = divide_layers(held, of_devices if sum(of_devices) >= sum(held) else of_all)[ranks.rank]
    return _part(checkpoint, range(parts[of_rank.start].start, parts[of_rank.stop - 1].stop), ranks)


def _part(checkpoint: Checkpoint, layers: range, ranks: Ranks) -> Checkpoint:
    """A checkpoint of some layers, with what a rank has outside of them."""
    stage = Stage.of(checkpoint.spec, layers, ranks)
    is_all = stage.rank == 0 or not stage.is_native
    non_layer = tuple(one for one in checkpoint.non_layer if is_all or len(one.shape) == 1)
    return replace(checkpoint, spec=stage, layers=checkpoint.layers[layers.start : layers.stop], non_layer=non_layer)


def of_all(plan: Plan, ranks: Ranks) -> PassBytes:
    """What the passes of all ranks move, one after the other. Raises CapacityError where keys and values would."""
    if plan.split is not None:
        change = "raise --device-memory, or lower --max-model-len"
        raise CapacityError("a pipeline keeps keys and values on its devices, with two slots for layers", change=change)
    tiers, own = zip(*plan.pass_bytes.streamed, strict=True)
    *streamed, computed, ahead = map(int, ranks.total(*own, plan.pass_bytes.computed, plan.pass_bytes.ahead))
    mine, tier = plan.touched, "host" if plan.budget.has_card else "disk"
    of_layer = (1, mine.n_experts, mine.n_used, mine.nbytes, mine.n_resident) if mine else (0,) * 5
    n, *sums = ranks.total(*(one * (mine.n_layers if mine else 0) for one in of_layer))
    experts = None
    if n:
        n_experts, n_used, nbytes = (round(one / n) for one in sums[:3])
        experts = TouchedExperts(tier, int(n), n_experts, n_used, nbytes, sums[3] / n)
    return PassBytes(tuple(zip(tiers, streamed, strict=True)), computed, ahead, experts=experts)

"""Mixtures of experts of which a pass brings those alone that its rows need, beside what others
publish.

All else of the layers is resident, with as many experts of each layer as fit; the host has as many
as fit there, the disk the rest. Every expert is taken to be needed as often as any other, the worst
case for those that are resident. Which ones a layer needs is known when its attention is through,
so bringing them hides behind nothing.
"""

from dataclasses import dataclass, replace

import numpy as np

from offload_rt.cost.pass_times import (
    HostTimes,
    MachineProfile,
    PassBytes,
    TouchedExperts,
    pass_time,
    transfer_s,
)
from offload_rt.cost.roofline import active_weights, n_weights
from offload_rt.engine.memory_plan import Sizes
from offload_rt.planning.forecast import Forecast

# GB/s at which a processor reads experts from its memory (assumed): two channels of DDR5-5600 have
# 89.6. Sixteen threads multiply MXFP4 and 4-bit integers at that rate, about 7 billion weights per
# second each (`python -m bench.compute`).
RAM_GBPS = 60.0
# Tokens a second, by the model's name.
PUBLISHED = {
    "gpt-oss-120b": (
        "33.1 by llama.cpp, --n-cpu-moe 25, RTX 3090 (r/LocalLLaMA, by ai-maestro.online)",
        (
            "25.6 by llama.cpp, --n-cpu-moe 36, i9-14900K (r/LocalLLaMA, by"
            " gokawiil.com/article/74814)"
        ),
    ),
    "qwen3-30b-a3b": (
        (
            "44 to 52 by ktransformers, bf16, RTX 5090, EPYC 9355 (kvcache-ai/ktransformers, issue"
            " 1914)"
        ),
        "36.7 by llama.cpp, Q4_K_M, --n-cpu-moe 36, RTX 2080 (AlexsJones/llmfit, pull request 755)",
    ),
}


@dataclass(frozen=True)
class TouchedForecast:
    """Plain decoding by the experts that each token needs.

    experts     that are not on the device
    nbytes      of them that a token needs
    n_on_host   of those of a layer, on average; the others are on the disk
    streamed_s  seconds of a token where they are brought to the card
    on_cpu_s    where the processor computes some of those meanwhile, and the card the rest
    host_nbytes brought to the card then
    """

    experts: TouchedExperts
    nbytes: int
    n_on_host: float
    streamed_s: float
    on_cpu_s: float
    host_nbytes: int


def touched(forecast: Forecast) -> TouchedForecast | None:
    """The same model, context and machine by touched experts; None for one without experts, or
    where the rest does not fit.
    """
    machine = forecast.machine
    plan = forecast.memory_plan.plan
    target = forecast.request.models[0]
    found = experts_of(target)
    if found is None or target.link is not None or not machine.budget.has_card:
        return None
    experts, share = found
    of_each = experts.n_layers * experts.nbytes
    # Room for those of a layer that are computed and those that arrive.
    rest = (
        sum(plan.layer_nbytes) - experts.n_experts * of_each + 2 * experts.n_used * experts.nbytes
    )
    n_on_device = min(
        (machine.budget.device - plan.reserved.total - rest) / of_each, experts.n_experts
    )
    if n_on_device < 0:
        return None
    n_on_host = min(machine.budget.host_room(1) / of_each, experts.n_experts - n_on_device)
    experts = replace(experts, n_resident=n_on_device)
    of_disk = replace(experts, tier="disk", n_resident=n_on_device + n_on_host)
    links = dict(machine.links)

    def seconds(of_host: TouchedExperts, computing_s: float) -> float:
        profile = MachineProfile(
            machine.title, False, machine.links, 1.0, machine.fixed_s + computing_s
        )
        return pass_time(profile, PassBytes((), 0, experts=of_host, disk_experts=of_disk))

    host_s = transfer_s(experts.nbytes, RAM_GBPS)
    beside = replace(experts, host=HostTimes((1,), (host_s,)))
    moved, less = (int(one.pass_nbytes(np.array(1), links["host"])) for one in (experts, beside))
    of_cpu = share * (moved - less) / (of_each * experts.n_used)
    streamed_s = seconds(experts, forecast.row_s)
    on_cpu_s = seconds(beside, (1 - of_cpu) * forecast.row_s)
    return TouchedForecast(experts, moved, n_on_host, streamed_s, on_cpu_s, less)


def experts_of(sizes: Sizes) -> tuple[TouchedExperts, float] | None:
    """The experts of a model, by its first layer that has some, and their part of what a row meets
    of that layer.
    """
    spec = sizes.spec
    mixture = sizes.spec.mixture
    if mixture is None:
        return None
    i = mixture.layers[0]
    owners = spec.expert_names(mixture.layers[0])
    tensors = [
        one
        for one in spec.layer_tensors(i)
        if owners.keys() & {one.name, one.name.rpartition(".")[0]}
    ]
    of_experts = n_weights(tensors)
    met = active_weights(spec, i)
    rest = n_weights(spec.layer_tensors(i)) - of_experts
    nbytes = (sizes.layer_nbytes[i] - rest * sizes.dtype.itemsize) // mixture.n_experts
    return TouchedExperts("host", len(mixture.layers), *mixture[1:], nbytes), 1 - rest / met

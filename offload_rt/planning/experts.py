"""Mixtures of experts of which a pass brings those alone that its rows need, beside what others publish.

All else of the layers is resident, with as many experts of each layer as fit; the host has as many as fit there, the disk
the rest. Every expert is taken to be needed as often as any other, the worst case for those that are resident. Which ones a
layer needs is known when its attention is through, so bringing them hides behind nothing.
"""

import re
from dataclasses import dataclass, replace

import numpy as np

from offload_rt.engine.memory_plan import Sizes
from offload_rt.planning.forecast import Forecast
from offload_rt.planning.roofline import met_weights, n_weights
from offload_rt.system.machine import MachineProfile, PassBytes, TouchedExperts, pass_time

# GB/s at which a processor reads weights from its memory (assumed): two channels of DDR5-5600 have 89.6.
RAM_GBPS = 60.0
# Of a checkpoint that has experts one by one; else those of a layer are one tensor of three dimensions.
_ONE = re.compile(r"experts\.(?:\w+\.)?(\d+)\.")
# Tokens a second, by the model's name.
PUBLISHED = {
    "gpt-oss-120b": (
        "33.1 by llama.cpp, --n-cpu-moe 25, RTX 3090 (r/LocalLLaMA, by ai-maestro.online)",
        "25.6 by llama.cpp, --n-cpu-moe 36, i9-14900K (r/LocalLLaMA, by gokawiil.com/article/74814)",
    ),
    "qwen3-30b-a3b": (
        "44 to 52 by ktransformers, bf16, RTX 5090, EPYC 9355 (kvcache-ai/ktransformers, issue 1914)",
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
    on_cpu_s    where the processor computes with those that are not resident, and the card with the rest
    """

    experts: TouchedExperts
    nbytes: int
    n_on_host: float
    streamed_s: float
    on_cpu_s: float


def touched(forecast: Forecast) -> TouchedForecast | None:
    """The same model, context and machine by touched experts; None for one without experts, or where the rest does not fit."""
    machine, plan, target = forecast.machine, forecast.memory_plan.plan, forecast.request.models[0]
    found = experts_of(target)
    if found is None or target.link is not None or not machine.budget.has_card:
        return None
    experts, share = found
    of_each = experts.n_layers * experts.nbytes
    # Room for those of a layer that are computed and those that arrive.
    rest = sum(plan.layer_nbytes) - experts.n_experts * of_each + 2 * experts.n_used * experts.nbytes
    n_on_device = min((machine.budget.device - plan.reserved.total - rest) / of_each, experts.n_experts)
    if n_on_device < 0:
        return None
    n_on_host = min(machine.budget.host_room(1) / of_each, experts.n_experts - n_on_device)
    experts = replace(experts, n_resident=n_on_device)
    of_disk, links = replace(experts, tier="disk", n_resident=n_on_device + n_on_host), dict(machine.links)

    def seconds(host_gbps: float, computing_s: float) -> float:
        rates = (("disk", links["disk"]), ("host", host_gbps))
        profile = MachineProfile(machine.title, False, rates, 1.0, machine.fixed_s + computing_s)
        return max(pass_time(profile, PassBytes((), 0, experts=one)) for one in (experts, of_disk))

    of_cpu = share * (1 - n_on_device / experts.n_experts)
    streamed_s, on_cpu_s = seconds(links["host"], forecast.row_s), seconds(RAM_GBPS, (1 - of_cpu) * forecast.row_s)
    return TouchedForecast(experts, int(experts.of_pass(np.array(1))), n_on_host, streamed_s, on_cpu_s)


def experts_of(sizes: Sizes) -> tuple[TouchedExperts, float] | None:
    """The experts of a model, by its first layer that has some, and their part of what a row meets of that layer."""
    spec, layers = sizes.spec, []
    for i in range(spec.n_layers):
        shapes = spec.layer_tensors(i)
        tensors = [one for one in shapes if (len(one.shape) == 3 and one.shape[1] > 1) or _ONE.search(one.name)]
        layers += [(i, tensors)] if tensors else []
    if not layers:
        return None
    i, tensors = layers[0]
    n_experts = len({one[1] for one in map(_ONE.search, (name for name, _ in tensors)) if one}) or tensors[0].shape[0]
    of_experts, met = n_weights(tensors), met_weights(spec, i)
    rest = n_weights(spec.layer_tensors(i)) - of_experts
    nbytes = (sizes.layer_nbytes[i] - rest * sizes.dtype.itemsize) // n_experts
    n_used = int((met - rest) * n_experts / of_experts)  # a row computes more than products
    return TouchedExperts("host", len(layers), n_experts, n_used, nbytes), 1 - rest / met

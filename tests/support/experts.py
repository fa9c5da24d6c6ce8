"""Expert caches and models with a small number of expert slots."""

import threading
from contextlib import closing, contextmanager
from dataclasses import replace

import offload_rt.llm
from offload_rt.models.layers import Mixture
from offload_rt.offload.card_experts import CardExperts, PinnedExperts, TieredExperts
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.placement import ExpertSizes
from offload_rt.offload.streamer import LayerSources, LayerView
from offload_rt.offload.thread_experts import ThreadExperts
from offload_rt.system.trace import Trace
from support.checkpoints import pack
from support.streams import FakeGPU, Host, Watched, stream_layers
from support.tiny import open_unloaded, parsed_once

MIXTURE = Mixture((0, 2), 3, 2)  # six experts


class FakeGPUWithDisk(FakeGPU):
    """A fake GPU whose host has slots for as few as two experts."""


@contextmanager
def cache_on(make, files, n_slots, n_on_host=2, **how):
    """A cache of experts, the six layers of the streamers' tests; its tier, and its device."""
    before = {*threading.enumerate()}
    device = make()
    streamer = device.stream(LayerSources(MemoryTier(), (), 0))
    if make is FakeGPU:
        tier = MemoryTier()
        for i, layer in enumerate(stream_layers()):
            tier.put(i, pack(layer))
    else:
        packed = make is FakeGPUWithDisk
        tier = Watched(DiskTier(files, ReadSettings(4096, 2), packed=packed), **how)
    sizes = ExpertSizes(MIXTURE, max(tier.layout(i).nbytes for i in range(6)), n_on_host)
    number = iter(range(1 << 30))

    def view(layout, block):
        return LayerView(next(number), layout, block)

    given = sizes, n_slots, tier, view
    if make is Host:
        cache = ThreadExperts(*given, streamer.meter, Trace())
    elif make is FakeGPUWithDisk:
        host = PinnedExperts(sizes, tier, view, device.copies, Trace(), frozenset())
        cache = TieredExperts(sizes, n_slots, host, streamer)
    else:
        cache = CardExperts(*given, streamer)
    try:
        yield cache, tier, device
    finally:
        for part in (cache, streamer, device):
            part.close()
        assert {*threading.enumerate()} == before
        tier.close()


@contextmanager
def open_touched(folder, n_slots, watch=False, device="cpu", **settings):
    """An LLM with slots for so many experts, all else on the device."""
    settings = {"device": device, "max_model_len": 128, "drafter": "none"} | settings
    with parsed_once():
        with open_unloaded(folder, **settings) as unloaded:
            reserved = unloaded.plan.reserved.total
        rest, experts = offload_rt.llm.open_checkpoint(folder).by_expert()
        with (
            closing(DiskTier(rest.layers, packed=device == "cuda")) as layers,
            closing(DiskTier(experts, packed=device == "cuda")) as tier,
        ):
            reserved += sum(layers.layout(i).nbytes for i in range(len(rest.layers)))
            slot = max(tier.layout(i).nbytes for i in range(len(experts)))
            # blocks of a card end at pages
            reserved += len(rest.layers) * 8192 if device == "cuda" else 0
        settings["device_memory"] = reserved + n_slots * slot
        unloaded = open_unloaded(folder, **settings)
    with unloaded as llm:
        if watch:
            files = llm.spec.files
            llm.spec = replace(llm.spec, files=replace(files, experts=Watched(files.experts)))
        llm.load()
        assert llm.plan.n_expert_slots == n_slots and set(llm.plan.tiers) == {"device"}
        yield llm

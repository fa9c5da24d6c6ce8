"""Tiers behind a link of a fixed rate, to measure without the noise of a disk."""

import argparse
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from bench.common.checkpoints import expanded_model
from offload_rt.config import EngineConfig, parse_size
from offload_rt.kv.cache import RowRange
from offload_rt.kv.split import KVSplit
from offload_rt.llm import LLM
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.offloaded_rows import FileRows
from offload_rt.offload.sidecar import SidecarTier
from offload_rt.offload.streamer import Streamer
from offload_rt.offload.tier import Read, Tier
from offload_rt.speculate.select import Drafting
from offload_rt.weights.layout import Layout

# Queued parts of a link: the current and the next. A link with a single part idles until a thread
# wakes.
N_QUEUED = 2


def sweep(streamer: Streamer, n: int = 1) -> None:
    """Stream all layers n times."""
    for _ in range(n):
        with closing(streamer.sweep()) as views:
            for _ in views:
                pass


class PacedLink:
    """A link of `gbps` GB/s that transfers parts in sequence."""

    def __init__(self, gbps: float) -> None:
        self._gbps = gbps
        self._lock = threading.Lock()
        self._free_at = 0.0

    def paced(self, part: Read) -> Read:
        """Return a read that ends when the link would deliver it."""

        def read() -> int:
            asked = time.perf_counter()
            nbytes = part()
            with self._lock:
                self._free_at = max(self._free_at, asked) + nbytes / (self._gbps * 1e9)
                arrives = self._free_at
            time.sleep(max(arrives - time.perf_counter(), 0.0))
            return nbytes

        return read


class PacedTier:
    """A source tier behind a private or shared link."""

    def __init__(self, source: Tier, link: float | PacedLink, n_parallel: int = 1) -> None:
        """link: a link or its GB/s; n_parallel: queued parts."""
        self._source = source
        self._link = link if isinstance(link, PacedLink) else PacedLink(link)
        self.n_parallel = n_parallel

    def layout(self, i: int) -> Layout:
        """Return the layout of the source."""
        return self._source.layout(i)

    def reads(self, i: int, into: Tensor) -> list[Read]:
        """Return the paced reads of the source."""
        return [self._link.paced(part) for part in self._source.reads(i, into)]

    def close(self) -> None:
        """Close the source."""
        self._source.close()


class _PacedDisk(PacedTier):
    def __init__(self, source: SidecarTier | DiskTier, link: PacedLink) -> None:
        super().__init__(source, link, N_QUEUED)
        self.settings: ReadSettings = source.settings


def pace(llm: LLM, gbps: float) -> None:
    """Put the disk layers and experts of an opened model behind a shared link."""
    files = llm.spec.files
    link = PacedLink(gbps)
    experts = files.experts and _PacedDisk(files.experts, link)
    files = replace(files, disk=_PacedDisk(files.disk, link), experts=experts)
    llm.spec = replace(llm.spec, files=files)


def open_paced(config: EngineConfig, gbps: float, drafting: Drafting | None = None) -> LLM:
    """Load a model whose disk is behind a link of this rate; at 0 without the link."""
    llm = LLM.open(config, drafting)
    if gbps:
        pace(llm, gbps)
    llm.load()
    return llm


def open_expanded(flags: argparse.Namespace, **settings: Any) -> LLM:
    """Load the demo target of `--size` with half of it as budget, or resident at `--gbps` 0."""
    nbytes = parse_size(flags.size)
    memory = nbytes // 2 if flags.gbps else 2 * nbytes
    model = str(expanded_model(flags.size))
    config = EngineConfig(model, device_memory=memory, device="cpu", **settings)
    return open_paced(config, flags.gbps)


def open_streamed(config: EngineConfig, gbps: float, n_slots: int) -> LLM:
    """Load a model with memory for `n_slots` layers only."""
    with LLM.open(config) as unloaded:
        plan = unloaded.plan
    memory = plan.reserved.total + plan.link.buffer + n_slots * plan.slot_nbytes
    return open_paced(replace(config, device_memory=memory), gbps)


class PacedRows(FileRows):
    """Off-device KV rows behind a link."""

    def __init__(self, split: KVSplit, n_layers: int, streamer: Streamer, link: PacedLink) -> None:
        super().__init__(split, n_layers, streamer)
        self._paced_link = link

    def tier(self, ranges: Sequence[RowRange]) -> Tier:
        """Return the paced tier of row ranges."""
        return PacedTier(super().tier(ranges), self._paced_link, N_QUEUED)

    def read(self, places: Sequence[RowRange]) -> Tensor:
        """Read rows at the rate of the link."""
        rows = super().read(places)
        self._paced_link.paced(lambda: rows.nbytes)()
        return rows

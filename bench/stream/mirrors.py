"""Sweeps over a checkpoint on two disks of fixed rates, against the first disk alone.

The second disk has a mirror, or a part of each layer.
"""

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from torch import Tensor

from bench.common.measure import Spread, interleaved, timed
from bench.common.pacing import PacedLink, sweep
from offload_rt.offload import mirrors
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.mirrors import NO_MIRRORS, Mirrors
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.stripe import stripe

# GB/s of the disks. The first is also the rate of the single disk.
CASES = {"two equal disks": (0.6, 0.6), "a disk and one of a third": (0.6, 0.2)}


@contextmanager
def paced_folders(gbps: dict[Path, float]) -> Iterator[None]:
    """Pace all reads of files in these folders."""
    links = {folder.resolve(): PacedLink(rate) for folder, rate in gbps.items()}
    fill = mirrors.fill

    def paced(into: Tensor, need: int, file: int, start: int, name: str) -> None:
        def read() -> int:
            fill(into, need, file, start, name)
            return need

        links[Path(name).resolve().parent].paced(read)()

    with mock.patch.object(mirrors, "fill", paced):
        yield


def sweep_seconds(model: Path, mirrors: Mirrors, paces: dict[Path, float]) -> float:
    """Return the seconds of a sweep over all layers, after a sweep that measures the rates.

    paces  GB/s by folder
    """
    checkpoint = open_checkpoint(model)
    n_layers = checkpoint.spec.n_layers
    with paced_folders(paces), closing(DiskTier(checkpoint.layers, mirrors=mirrors)) as tier:
        sources = LayerSources(MemoryTier(), (tier,) * n_layers, 3)
        with closing(ThreadStreamer(sources, Trace(on=False))) as streamer:
            sweep(streamer)
            return timed(partial(sweep, streamer))


def measure(model: Path, rounds: int) -> dict[str, object]:
    """Compare the seconds of a sweep with two disks and with one disk."""
    print("\n## Disks of fixed rates: a sweep with two disks / with one disk")
    results: dict[str, object] = {}
    with TemporaryDirectory(dir=model.parent) as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(model, copy)
        for name, gbps in CASES.items():
            striped = Path(scratch) / f"striped-{gbps[1]}"
            stripe(model, [striped], gbps, lambda done, total: None)
            both = dict(zip((model, copy), gbps, strict=True))
            parts = dict(zip((model, striped), gbps, strict=True))
            works = {
                "one": partial(sweep_seconds, model, NO_MIRRORS, {model: gbps[0]}),
                "mirror": partial(sweep_seconds, model, Mirrors(model, (copy,)), both),
                "stripe": partial(sweep_seconds, striped, NO_MIRRORS, parts),
            }
            seconds = interleaved(works, rounds, warm_up=0)
            floor = gbps[0] / sum(gbps)
            rates = ", ".join(f"{rate} GB/s" for rate in gbps)
            for way in ("mirror", "stripe"):
                ratio = Spread.of_ratios(seconds[way], seconds["one"])
                print(f"{way}, {name} ({rates}): {ratio}; floor {floor:.2f}")
                results[f"{way}, {name}"] = {"ratio": ratio, "floor": floor}
    return results

"""Sweeps over a checkpoint on two disks of fixed rates, against the first disk alone."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from torch import Tensor

from bench.common.measure import Spread, interleaved, timed
from bench.common.pacing import PacedLink
from offload_rt.offload import disk
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.mirrors import Mirrors
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.system.trace import Trace
from offload_rt.weights.checkpoint import open_checkpoint

# GB/s of the disks. The first is also the rate of the single disk.
CASES = {"two equal disks": (0.6, 0.6), "a disk and one of a third": (0.6, 0.2)}


@contextmanager
def paced_folders(gbps: dict[Path, float]) -> Iterator[None]:
    """Pace all reads of files in these folders."""
    links = {folder: PacedLink(rate) for folder, rate in gbps.items()}
    fill = disk.fill

    def paced(into: Tensor, need: int, file: int, start: int, name: str) -> None:
        def read() -> int:
            fill(into, need, file, start, name)
            return need

        links[Path(name).parent].paced(read)()

    with mock.patch.object(disk, "fill", paced):
        yield


def sweep_seconds(model: Path, folders: Sequence[Path], gbps: Sequence[float]) -> float:
    """Return the seconds of a sweep over all layers, after a sweep that measures the rates."""
    checkpoint = open_checkpoint(model)
    n_layers = checkpoint.spec.n_layers
    mirrors = Mirrors(model, tuple(folders[1 : len(gbps)]))
    paces = dict(zip(folders, gbps, strict=False))
    with paced_folders(paces), closing(DiskTier(checkpoint.layers, mirrors=mirrors)) as tier:
        sources = LayerSources(MemoryTier(), (tier,) * n_layers, 3)
        with closing(ThreadStreamer(sources, Trace(on=False))) as streamer:

            def sweep() -> None:
                with closing(streamer.sweep()) as views:
                    for _ in views:
                        pass

            sweep()
            return timed(sweep)


def measure(model: Path, rounds: int) -> dict[str, object]:
    """Compare the seconds of a sweep with two disks and with one disk."""
    print("\n## Disks of fixed rates: a sweep with a mirror / with one disk")
    results: dict[str, object] = {}
    with TemporaryDirectory(dir=model.parent) as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(model, copy)
        for name, gbps in CASES.items():
            works = {
                "one": partial(sweep_seconds, model, (model, copy), gbps[:1]),
                "both": partial(sweep_seconds, model, (model, copy), gbps),
            }
            seconds = interleaved(works, rounds, warm_up=0)
            ratio = Spread.of_ratios(seconds["both"], seconds["one"])
            floor = gbps[0] / sum(gbps)
            rates = ", ".join(f"{rate} GB/s" for rate in gbps)
            print(f"{name} ({rates}): {ratio}; floor {floor:.2f}")
            results[name] = {"ratio": ratio, "floor": floor}
    return results

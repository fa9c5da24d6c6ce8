"""How much faster is a streamed pass over the links of two ranks than over a single link?

    python -m bench.ranks [--size 200MB] [--gbps 0.1] [--rounds 3]
    python -m bench.ranks --ways [--of 2] [--model DIR]

Start a single process, and two by torchrun, in turn. Each rank has a paced link. The floor is the
bytes of a rank over the rate of its link.

With --ways, compare how the first rank reads its shard from the disk: from the checkpoint, sharded
by inputs or by outputs, or from the files of `offload-rt convert`. Bytes are relative to the shard,
seconds to sharding by outputs.
"""

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest import mock

from torch import Tensor

from bench.common.checkpoints import expanded_model
from bench.common.measure import Benchmark, Spread, interleaved, timed
from bench.common.pacing import open_streamed
from bench.common.processes import run_json
from offload_rt.config import EngineConfig
from offload_rt.engine.link import sidecar_of
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.mirrors import DirectFiles
from offload_rt.offload.sidecar import SidecarTier, open_sidecar, write_sidecar
from offload_rt.offload.tier import read_parallel
from offload_rt.parallel.sharded_weights import shard_checkpoint
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint
from offload_rt.weights.layout import host_block

N_SLOTS = 3
CONTEXT = 20


def measure(model: str, gbps: float, n_passes: int) -> None:
    """Print the seconds of passes and the link bytes of a pass on rank 0."""
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 128, "link_format": "raw"}
    config = EngineConfig(model, exact_parallel="RANK" in os.environ, **settings)
    with open_streamed(config, gbps, N_SLOTS) as llm:
        assert set(llm.plan.tiers) == {"disk"}, llm.plan.tiers
        seconds = llm.time_plain(CONTEXT, n_passes)
    print(json.dumps({"seconds": seconds, "nbytes": llm.plan.streamed_nbytes}))


def converted(part: Checkpoint, folder: Path, kind: str) -> DiskTier | SidecarTier:
    """Write and open the sidecar of a shard."""
    directory = sidecar_of(part, str(folder), kind)
    write_sidecar(part, directory, lambda done, total: None, kind == "raw")
    files = open_sidecar(part, directory)
    if kind == "lossless":
        return SidecarTier(files, ReadSettings(), decodes=True)
    pairs = zip(files, part.layers, strict=True)
    return DiskTier([file.raw_block(layer) for file, layer in pairs])


def read_all(tier: DiskTier | SidecarTier, n_layers: int, block: Tensor) -> None:
    """Read all layers of a tier into a block."""
    for i in range(n_layers):
        read_parallel(tier.reads(i, block), tier.n_parallel)


def compare_reads(model: Path, size: int, rounds: int) -> dict[str, dict[str, object]]:
    """Print bytes and seconds of reading a shard, and the exchanges of a pass."""
    whole = open_checkpoint(model)
    by_inputs, by_outputs = (
        shard_checkpoint(whole, 0, size, is_exact) for is_exact in (False, True)
    )
    shard_nbytes = sum(layer.nbytes for layer in by_outputs.layers)
    n_layers = whole.spec.n_layers
    kinds = ("raw", "lossless") if whole.format.name == "dense" else ("raw",)
    read_sizes: list[int] = []
    fill = DirectFiles.fill
    result: dict[str, dict[str, object]] = {}

    def count(self: DirectFiles, path: Path, start: int, into: Tensor, need: int) -> None:
        read_sizes.append(need)
        fill(self, path, start, into, need)

    with TemporaryDirectory(dir=model.parent) as folder, ExitStack() as closes:
        tiers: dict[str, DiskTier | SidecarTier] = {
            "by inputs": DiskTier(by_inputs.layers),
            "by outputs": DiskTier(by_outputs.layers),
        }
        for kind in kinds:
            tiers[f"by inputs, {kind}"] = converted(by_inputs, Path(folder), kind)
        for tier in tiers.values():
            closes.callback(tier.close)
        sizes = [tier.layout(i).nbytes for tier in tiers.values() for i in range(n_layers)]
        block = host_block(max(sizes)).fill_(0)
        reads = {name: partial(read_all, tier, n_layers, block) for name, tier in tiers.items()}
        seconds = interleaved({name: partial(timed, read) for name, read in reads.items()}, rounds)
        closes.enter_context(mock.patch.object(DirectFiles, "fill", count))
        for name, read in reads.items():
            read_sizes.clear()
            read()
            spec = (by_outputs if name == "by outputs" else by_inputs).spec
            assert isinstance(spec, TensorParallelModel), "the checkpoint is sharded"
            n_exchanges = sum(len(spec.exchanges(i)) for i in range(n_layers))
            ratio = Spread.of_ratios(seconds[name], seconds["by outputs"])
            share = sum(read_sizes) / shard_nbytes
            result[name] = {"read": share, "seconds": ratio, "exchanges": n_exchanges}
            print(f"{name:20} reads {share:.3f} of the shard in {ratio}; {n_exchanges} exchanges")
    return result


def main() -> None:
    """Compare ranks or ways of reading, or measure as a rank."""
    bench = Benchmark("ranks", __doc__)
    bench.add("--size", default="200MB", help="of the expanded demo target")
    bench.add("--gbps", type=float, default=0.1, help="rate of each link")
    bench.add("--rounds", type=int, default=3)
    bench.add("--passes", type=int, default=3)
    bench.add("--ways", action="store_true", help="compare ways of reading a shard")
    bench.add("--model", type=Path, help="checkpoint for --ways")
    bench.add("--of", type=int, default=2, help="number of ranks for --ways")
    bench.add("--measure", help="checkpoint; print measurements of this rank")
    flags = bench.parse()
    if flags.measure:
        return measure(flags.measure, flags.gbps, flags.passes)
    bench.print_header()
    if flags.ways:
        model = flags.model or expanded_model(flags.size)
        return bench.finish(ways=compare_reads(model, flags.of, flags.rounds))
    model = str(expanded_model(flags.size))
    rank = ["-m", "bench.ranks", "--measure", model, "--gbps", str(flags.gbps)]
    rank += ["--passes", str(flags.passes)]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    commands = {"1 rank": rank, "2 ranks": [*torchrun, *rank]}
    works = {name: partial(run_json, command) for name, command in commands.items()}
    runs = interleaved(works, flags.rounds, warm_up=0)
    nbytes = {name: run[0].result["nbytes"] for name, run in runs.items()}
    seconds = {name: [median(r.result["seconds"]) for r in run] for name, run in runs.items()}
    share = nbytes["2 ranks"] / nbytes["1 rank"]
    over_floor = {}
    print(f"bytes of a rank / all   {share:.4f}")
    for name, times in seconds.items():
        floor = nbytes[name] / flags.gbps / 1e9
        over_floor[name] = Spread.of([time / floor for time in times])
        print(f"pass / floor, {name:9} {over_floor[name]}")
    ratio = Spread.of_ratios(seconds["2 ranks"], seconds["1 rank"])
    print(f"2 ranks / 1 rank        {ratio}; floor {share:.4f}")
    bench.finish(bytes_ratio=share, ratio=ratio, over_floor=over_floor)


if __name__ == "__main__":
    main()

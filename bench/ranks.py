"""How much faster is a pass whose layers stream over the links of two ranks than over that of one?

`python -m bench.ranks` starts one process and two by torchrun in turn, each with a link of its own
of a set speed, and times plain passes of the same model. The floor is the bytes of a rank over the
rate of its link. The last line is one JSON object.

`python -m bench.ranks --ways` asks instead how the first of --of ranks reads its part of the layers
from this disk: as they lie in the checkpoint, divided by inputs or by outputs, or from what convert
writes for it. Bytes are over those of its part, and seconds over those by outputs, in turn. --model
is a checkpoint other than the demo target.
"""

import argparse
import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from unittest import mock

from torch import Tensor

from bench.measure import (
    Spread,
    commit,
    expanded_model,
    flag_parser,
    machine,
    print_result,
    run_json,
)
from bench.paced import pace
from offload_rt.config import EngineConfig
from offload_rt.engine.link import sidecar_of
from offload_rt.llm import LLM
from offload_rt.offload.disk import DirectFiles, DiskTier, ReadSettings
from offload_rt.offload.sidecar import SidecarTier, open_sidecar, write_sidecar
from offload_rt.offload.tier import read_parallel
from offload_rt.parallel.sharded_weights import part_of
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint
from offload_rt.weights.layout import host_block

N_SLOTS = 3
CONTEXT = 20


def measure(model: str, gbps: float, n_passes: int) -> None:
    """Print what rank 0 sees: seconds of passes, and the bytes that its link moves in each."""
    config = EngineConfig(
        model,
        device="cpu",
        drafter="none",
        max_model_len=128,
        exact_parallel="RANK" in os.environ,
        link_format="raw",
    )
    with LLM.open(config) as unloaded:
        plan = unloaded.plan
    llm = LLM.open(replace(config, device_memory=plan.reserved.total + N_SLOTS * plan.slot_nbytes))
    pace(llm, gbps)
    assert set(llm.plan.tiers) == {"disk"}, llm.plan.tiers
    llm.load()
    with llm:
        seconds = llm.time_plain(CONTEXT, n_passes)
    print(json.dumps({"seconds": seconds, "nbytes": llm.plan.streamed_nbytes}))


def written(part: Checkpoint, folder: Path, kind: str) -> DiskTier | SidecarTier:
    """The layers of a rank's part as convert writes them."""
    directory = sidecar_of(part, str(folder), kind)
    write_sidecar(part, directory, lambda done, total: None, kind == "raw")
    layers = open_sidecar(part, directory)
    if kind == "lossless":
        return SidecarTier(layers, ReadSettings(), decodes=True)
    return DiskTier([one.raw_block(layer) for one, layer in zip(layers, part.layers, strict=True)])


def read_all(tier: DiskTier | SidecarTier, n_layers: int) -> float:
    """Seconds of reading all layers."""
    block = host_block(max(tier.layout(i).nbytes for i in range(n_layers))).fill_(0)
    started = perf_counter()
    for i in range(n_layers):
        read_parallel(tier.reads(i, block), tier.n_parallel)
    return perf_counter() - started


def ways(model: Path, size: int, rounds: int) -> dict[str, dict[str, object]]:
    """Print bytes and seconds of reading a rank's layers, and what a pass exchanges besides."""
    whole = open_checkpoint(model)
    by_inputs, by_outputs = (part_of(whole, 0, size, is_exact) for is_exact in (False, True))
    n_own = sum(layer.nbytes for layer in by_outputs.layers)
    n_layers = whole.spec.n_layers
    kinds = ("raw", "lossless") if whole.format.name == "dense" else ("raw",)
    reads = list[int]()
    fill = DirectFiles.fill
    found = dict[str, dict[str, object]]()

    def count(self: DirectFiles, path: Path, start: int, into: Tensor, need: int) -> None:
        reads.append(need)
        fill(self, path, start, into, need)

    with TemporaryDirectory(dir=model.parent) as folder, ExitStack() as closes:
        tiers: dict[str, DiskTier | SidecarTier] = {
            "by inputs": DiskTier(by_inputs.layers), "by outputs": DiskTier(by_outputs.layers),
            **{f"by inputs, {kind}": written(by_inputs, Path(folder), kind) for kind in kinds},
        }  # fmt: skip
        for tier in tiers.values():
            closes.callback(tier.close)
        seconds = [
            [read_all(tier, n_layers) for tier in tiers.values()] for _ in range(rounds + 1)
        ][1:]
        closes.enter_context(mock.patch.object(DirectFiles, "fill", count))
        for k, (name, tier) in enumerate(tiers.items()):
            reads.clear()
            read_all(tier, n_layers)
            spec = (by_outputs if name == "by outputs" else by_inputs).spec
            assert isinstance(spec, TensorParallelModel), "a rank has a part of it"
            n_exchanges = sum(len(spec.exchanges(i)) for i in range(n_layers))
            ratio = Spread.of([one[k] / one[1] for one in seconds])
            found[name] = {
                "read": sum(reads) / n_own,
                "seconds": asdict(ratio),
                "exchanges": n_exchanges,
            }
            print(
                f"{name:20} reads {sum(reads) / n_own:.3f} of its bytes in {ratio}; {n_exchanges}"
                " exchanges a pass"
            )
    return found


def main() -> None:
    """Run both in turn and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="200MB", help="the demo target is expanded to it")
    parser.add_argument("--gbps", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--of", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.measure:
        return measure(flags.measure, flags.gbps, flags.passes)
    if flags.ways:
        found = ways(flags.model or expanded_model(flags.size), flags.of, flags.rounds)
        return print_result("ranks", flags, ways=found)
    own = [
        "-m",
        "bench.ranks",
        "--measure",
        str(expanded_model(flags.size)),
        "--gbps",
        str(flags.gbps),
    ]
    own += ["--passes", str(flags.passes)]
    ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    runs = [
        [run_json(command).result for command in (own, [*ranks, *own])] for _ in range(flags.rounds)
    ]
    ratio = Spread.of([median(two["seconds"]) / median(one["seconds"]) for one, two in runs])
    (one, two), floors = runs[0], [runs[0][i]["nbytes"] / flags.gbps / 1e9 for i in (0, 1)]
    over = [Spread.of([median(run[i]["seconds"]) / floors[i] for run in runs]) for i in (0, 1)]
    print(f"{machine()}; commit {commit()}; links of {flags.gbps} GB/s")
    print(f"bytes of a rank / all           {two['nbytes'] / one['nbytes']:.4f}")
    print(f"pass / floor, one rank          {over[0]}")
    print(f"pass / floor, two ranks         {over[1]}")
    print(f"pass of two ranks / of one      {ratio}; floor {floors[1] / floors[0]:.4f}")
    over_floor = [asdict(spread) for spread in over]
    print_result(
        "ranks",
        flags,
        bytes_ratio=two["nbytes"] / one["nbytes"],
        ratio=asdict(ratio),
        over_floor=over_floor,
    )


if __name__ == "__main__":
    main()

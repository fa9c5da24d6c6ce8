"""Does a pass whose keys and values do not fit on the device cost more than moving its bytes?

    python -m bench.long_context [--context 32768] [--gbps 0.25] [--dtype float32] [--rounds 5]

A random model is streamed, and of its keys and values a quarter is on the device; the cache is
filled with rows, not computed. A pass of one token is held against its floor: over the disk the
same reads without computing, in turn; over a link of a set speed the bytes of weights and rows over
that speed. Bytes are those that the meter of the link counts, beside those of the plan. The last
line is one JSON object.
"""

import time
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.measure import Spread, commit, flag_parser, machine, print_result, resident_layers
from bench.paced import N_QUEUED, PacedLink, PacedRows, PacedTier
from offload_rt.config import format_size
from offload_rt.dtypes import DType
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.kv.host import HostCache
from offload_rt.kv.split import KVSplit, RowFormat
from offload_rt.llm import LLM
from offload_rt.offload.offloaded_rows import FileRows
from offload_rt.offload.placement import spread
from offload_rt.offload.stream_threads import ThreadStreamer
from offload_rt.offload.streamer import LayerSources
from offload_rt.offload.tier import Tier
from offload_rt.system.trace import Trace
from offload_rt.tree.topology import Topology

_SIZES = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
_N_RESIDENT = 3
_N_SLOTS = 3
_SHARE = 4


class Passes:
    """Passes of one token after a long context, over some tier of the layers."""

    def __init__(
        self, llm: LLM, tier: Tier, context: int, link: PacedLink | None, closes: ExitStack
    ) -> None:
        like = llm.engine.runner
        source = resident_layers(llm)
        spec = self.spec = like.spec
        resident = spread(spec.n_layers, _N_RESIDENT)
        streamed = tuple(None if i in resident else tier for i in range(spec.n_layers))
        streamer = ThreadStreamer(LayerSources(source, streamed, _N_SLOTS), Trace(on=False))
        where = like.device, like.dtype
        self.runner = Runner(spec, streamer, like.non_layer, like.format, *where, Trace(on=False))
        closes.enter_context(closing(self.runner))
        split = KVSplit.least(
            spec,
            context + 1,
            1,
            RowFormat(spec.n_kv_heads, spec.head_dim, DType.from_torch(like.dtype)),
            512,
        )
        split = replace(split, n_on_device=context // _SHARE)
        of_rows = split, spec.n_layers, streamer
        self.offloaded_rows = self.runner.offloaded_rows = (
            PacedRows(*of_rows, link) if link else FileRows(*of_rows)
        )
        id = self.runner.new_cache(context + 1, share=split.share(context + 1, 1))
        self.cache = self.runner._caches[id]
        assert isinstance(self.cache, HostCache)
        self._fill(self.cache, context)
        self._step = Step(id, torch.zeros(1, dtype=torch.int64), Topology.chain(1), 1, context)
        self.row_nbytes = sum(
            (one.stop - one.start) * split.format.nbytes
            for i in range(spec.n_layers)
            for one in self.cache.offloaded(i)
        )
        self.weight_nbytes = sum(
            tier.layout(i).nbytes for i in range(spec.n_layers) if i not in resident
        )

    def _fill(self, cache: HostCache, context: int) -> None:
        for part in (cache._buffer.keys, cache._buffer.values):
            part.normal_()
        while cache.n_committed < context:
            n = min(64, context - cache.n_committed)
            cache.begin([0] * n)
            cache.commit(range(n))

    def seconds(self, n_passes: int = 3) -> tuple[float, float]:
        """Mean seconds of a pass, and bytes that came in each."""
        moments = []
        for _ in range(n_passes + 2):  # the first begins with layers that have come in already
            moments.append((time.perf_counter(), self.runner.streamer.meter.read()[0]))
            self.runner.forward([self._step])
            self.runner.discard(self._step.cache)
        (started, before), (ended, after) = moments[1], moments[-1]
        return (ended - started) / n_passes, (after - before) / n_passes

    def floor_s(self, n_passes: int = 3) -> float:
        """Mean seconds of the same reads without computing."""
        moments = []
        rows = [list(self.cache.offloaded(i)) for i in range(self.spec.n_layers)]
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            with self.offloaded_rows.prefetch([one for of_layer in rows for one in of_layer]):
                for view in self.runner.streamer.sweep():
                    for _ in rows[view.i]:
                        self.offloaded_rows.receive()
        return (moments[-1] - moments[1]) / n_passes


def measure(name: str, passes: Passes, rounds: int, gbps: float | None) -> dict[str, object]:
    """Passes against their floor, in turn."""
    moved = passes.weight_nbytes + passes.row_nbytes
    seconds = []
    floors = []
    counted = []
    for _ in range(rounds):
        floors.append(moved / gbps / 1e9 if gbps else passes.floor_s())
        one, nbytes = passes.seconds()
        seconds.append(one)
        counted.append(nbytes)
    ratio = Spread.of([one / floor for one, floor in zip(seconds, floors, strict=True)])
    print(
        f"\n## {name}: {format_size(passes.weight_nbytes)} of weights,"
        f" {format_size(passes.row_nbytes)} of rows a pass"
    )
    median = Spread.of(counted).median
    print(f"counted by the link   {format_size(median)} a pass, {median / moved:.4f} of these")
    print(
        f"floor                 {Spread.of(floors)} s, {moved / Spread.of(floors).median / 1e9:.2f}"
        " GB/s"
    )
    print(f"pass                  {Spread.of(seconds)} s")
    print(f"pass / floor          {ratio}")
    return {
        "weight_bytes": passes.weight_nbytes, "row_bytes": passes.row_nbytes,
        "counted_bytes": median,
        "floor_s": asdict(Spread.of(floors)), "pass_s": asdict(Spread.of(seconds)),
        "pass_over_floor": asdict(ratio),
    }  # fmt: skip


def main() -> None:
    """Run both and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--gbps", type=float, default=0.25)
    parser.add_argument("--dtype", default="float32", help="of weights, keys and values")
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}")
    results: dict[str, object] = {}
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        config = LlamaConfig(**_SIZES, dtype=flags.dtype, max_position_embeddings=2 * flags.context)
        LlamaForCausalLM(config).to(getattr(torch, flags.dtype)).save_pretrained(folder)
        with LLM(folder, device="cpu", drafter="none", max_model_len=256) as llm:
            kv_nbytes = flags.context * llm.engine.runner.spec.kv_nbytes(
                llm.spec.target.dtype.itemsize
            )
            print(
                f"keys and values of {flags.context} tokens: {format_size(kv_nbytes)}, a quarter of"
                " them on the device"
            )
            link = PacedLink(flags.gbps)
            for name, tier, its_link, gbps in (
                ("disk", llm.spec.files.disk, None, None),
                (
                    f"a link of {flags.gbps} GB/s",
                    PacedTier(resident_layers(llm), link, N_QUEUED),
                    link,
                    flags.gbps,
                ),
            ):
                with ExitStack() as closes:
                    results[name] = measure(
                        name, Passes(llm, tier, flags.context, its_link, closes), flags.rounds, gbps
                    )
    print_result("long_context", flags, **results)


if __name__ == "__main__":
    main()

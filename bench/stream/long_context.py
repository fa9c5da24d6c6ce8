"""Does a pass with keys and values beyond the device cost more than moving its bytes?

    python -m bench.stream.long_context [--context 32768] [--gbps 0.25] [--dtype float32]

Stream a random model with a quarter of its keys and values on the device. Cache rows are random,
not computed. The floor of a pass of a single token is the same disk reads without compute,
interleaved, or the bytes of weights and rows over the rate of a paced link.
"""

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.common.checkpoints import resident_layers
from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.pacing import N_QUEUED, PacedLink, PacedRows, PacedTier
from offload_rt.config import format_size
from offload_rt.dtypes import DType
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Step
from offload_rt.kv.split import KVSplit, RowFormat
from offload_rt.llm import LLM
from offload_rt.offload.offloaded_cache import HostCache, HostMemory
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
    """Passes of a single token after a long context."""

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
        row_format = RowFormat(spec.n_kv_heads, spec.head_dim, DType.from_torch(like.dtype))
        split = KVSplit.least(spec, context + 1, 1, row_format, has_card=False)
        split = replace(split, n_on_device=context // _SHARE)
        of_rows = split, spec.n_layers, streamer
        rows = PacedRows(*of_rows, link) if link else FileRows(*of_rows)
        self.offloaded_rows = closes.enter_context(closing(rows))
        self.runner.memory = HostMemory(spec, like.dtype, like.device, rows)
        id = self.runner.new_cache(context + 1, share=split.share(context + 1, 1))
        self.cache = self.runner._caches[id]
        assert isinstance(self.cache, HostCache)
        self._fill(self.cache, context)
        self._step = Step(id, torch.zeros(1, dtype=torch.int64), Topology.chain(1), 1, context)
        self.row_nbytes = sum(
            (rows.stop - rows.start) * split.format.nbytes
            for i in range(spec.n_layers)
            for rows in self.cache.offloaded(i)
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
        """Return the mean seconds and link bytes of a pass."""
        moments = []
        for _ in range(n_passes + 2):  # the first pass starts with prefetched layers
            moments.append((time.perf_counter(), self.runner.streamer.meter.read()[0]))
            self.runner.forward([self._step])
            self.runner.discard(self._step.cache)
        (started, before), (ended, after) = moments[1], moments[-1]
        return (ended - started) / n_passes, (after - before) / n_passes

    def floor_s(self, n_passes: int = 3) -> float:
        """Return the mean seconds of the same reads without compute."""
        moments = []
        rows = [list(self.cache.offloaded(i)) for i in range(self.spec.n_layers)]
        for _ in range(n_passes + 2):
            moments.append(time.perf_counter())
            with self.offloaded_rows.prefetch([part for parts in rows for part in parts]):
                for view in self.runner.streamer.sweep():
                    for _ in rows[view.i]:
                        self.offloaded_rows.receive()
        return (moments[-1] - moments[1]) / n_passes


def measure(name: str, passes: Passes, rounds: int, gbps: float | None) -> dict[str, object]:
    """Compare passes with their floor, interleaved."""
    moved = passes.weight_nbytes + passes.row_nbytes
    floor = (lambda: (moved / gbps / 1e9, 0.0)) if gbps else (lambda: (passes.floor_s(), 0.0))
    runs = interleaved({"floor": floor, "pass": passes.seconds}, rounds, warm_up=0)
    floors = [seconds for seconds, _ in runs["floor"]]
    seconds, counted = zip(*runs["pass"], strict=True)
    floor_s = Spread.of(floors)
    median = Spread.of(counted).median
    ratio = Spread.of_ratios(seconds, floors)
    weights, rows = (format_size(n) for n in (passes.weight_nbytes, passes.row_nbytes))
    print(f"\n## {name}: {weights} of weights, {rows} of rows per pass")
    print(f"link meter    {format_size(median)} per pass, {median / moved:.4f} of the plan")
    print(f"floor         {floor_s} s, {moved / floor_s.median / 1e9:.2f} GB/s")
    print(f"pass          {Spread.of(seconds)} s")
    print(f"pass / floor  {ratio}")
    nbytes = {"weight_bytes": passes.weight_nbytes, "row_bytes": passes.row_nbytes}
    times = {"floor_s": floor_s, "pass_s": Spread.of(seconds), "pass_over_floor": ratio}
    return {**nbytes, "counted_bytes": median, **times}


def main() -> None:
    """Measure over the disk and over a paced link."""
    bench = Benchmark("long_context", __doc__)
    bench.add("--context", type=int, default=32768)
    bench.add("--gbps", type=float, default=0.25, help="rate of the paced link")
    bench.add("--dtype", default="float32", help="of weights, keys and values")
    bench.add("--rounds", type=int, default=5)
    flags = bench.start()
    results: dict[str, object] = {}
    with TemporaryDirectory(dir=Path.cwd()) as folder:
        config = LlamaConfig(**_SIZES, dtype=flags.dtype, max_position_embeddings=2 * flags.context)
        LlamaForCausalLM(config).to(getattr(torch, flags.dtype)).save_pretrained(folder)
        with LLM(folder, device="cpu", drafter="none", max_model_len=256) as llm:
            itemsize = llm.spec.target.dtype.itemsize
            kv_nbytes = flags.context * llm.engine.runner.spec.kv_nbytes(itemsize)
            size = format_size(kv_nbytes)
            print(f"KV cache of {flags.context} tokens: {size}, 1/{_SHARE} on the device")
            link = PacedLink(flags.gbps)
            paced = PacedTier(resident_layers(llm), link, N_QUEUED)
            for name, tier, row_link, gbps in (
                ("disk", llm.spec.files.disk, None, None),
                (f"a link of {flags.gbps} GB/s", paced, link, flags.gbps),
            ):
                with ExitStack() as closes:
                    passes = Passes(llm, tier, flags.context, row_link, closes)
                    results[name] = measure(name, passes, flags.rounds, gbps)
    bench.finish(**results)


if __name__ == "__main__":
    main()

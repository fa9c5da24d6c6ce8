"""How many bytes and how much time do lossless weights save on the link?

    python -m bench.stream.lossless [--size 400MB] [--gbps 0.5] [--rounds 5]

Measure encoded / raw bytes of the expanded demo target and of normal random weights; decoded GB/s
of a thread, by C++, next to a copy; streamed passes of a single token, encoded / raw,
with the disk paced to --gbps. The tokens must be equal.
"""

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.common.checkpoints import expanded_model
from bench.common.measure import Benchmark, Spread, interleaved, timed
from bench.common.pacing import open_streamed
from offload_rt.config import EngineConfig
from offload_rt.dtypes import DType
from offload_rt.offload.disk import ReadSettings
from offload_rt.offload.sidecar import SidecarTier, open_sidecar, write_sidecar
from offload_rt.ops import lossless
from offload_rt.sampling_params import SamplingParams
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.lossless import EncodedImage, encode_layer

PROMPT = [0, 300, 17, 511, 42]
TOKENS = 6


def random_normal(n: int = 45_000_000) -> PackedLayer:
    """Return a layer of a single 90 MB matrix, larger than caches."""
    layout = packed_layout([("w", (n,), DType.BFLOAT16)])
    image = PackedLayer(host_block(layout.nbytes), layout)
    normal = torch.randn(n, generator=torch.Generator().manual_seed(0))
    image.layout.views(image.block)["w"].copy_(normal)
    return image


def decode_speeds(image: EncodedImage, rounds: int) -> dict[str, Spread]:
    """Measure decoded GB/s of each implementation and of a copy, on a single thread."""
    out, raw = (host_block(image.encoded.layout.nbytes).fill_(1).numpy() for _ in range(2))
    content = image.block.numpy()
    chunks = image.encoded.chunks.tolist()

    def all_chunks(decode: Callable[..., object]) -> None:
        for source, target, n, nbytes, kind in chunks:
            decode(content[source : source + nbytes], kind, n, out[target:])

    ways: dict[str, Callable[[], object]] = {
        "decoding": partial(all_chunks, lossless.decode),
        "digests": partial(all_chunks, lambda part, *_: lossless.digest(part)),
        "copy": lambda: out.__setitem__(slice(None), raw),
    }
    seconds = interleaved({name: partial(timed, work) for name, work in ways.items()}, rounds)
    nbytes = len(out) / 1e9
    return {name: Spread.of([nbytes / s for s in times]) for name, times in seconds.items()}


def one_run(model: Path, sidecar: Path, gbps: float, link_format: str) -> tuple[float, list[int]]:
    """Return seconds of a streamed pass, and the tokens."""
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 256}
    config = EngineConfig(str(model), link_format=link_format, sidecar=str(sidecar), **settings)
    with open_streamed(config, gbps, 3) as llm:
        llm.generate([PROMPT], SamplingParams(max_new_tokens=1))
        started = time.perf_counter()
        output = llm.generate([PROMPT], SamplingParams(max_new_tokens=TOKENS))[0]
        return (time.perf_counter() - started) / output.stats.n_passes, output.token_ids


def main() -> None:
    """Measure bytes, decoding and passes."""
    bench = Benchmark("lossless", __doc__)
    bench.add("--size", default="400MB", help="of the expanded demo target")
    bench.add("--gbps", type=float, default=0.5, help="rate of the disk, which is the limit")
    bench.add("--rounds", type=int, default=5)
    flags = bench.start()
    torch.set_num_threads(1)
    model = expanded_model(flags.size)
    image = random_normal()
    checkpoint = open_checkpoint(model)
    with TemporaryDirectory(dir=model.parent) as directory:
        folder = Path(directory)
        started = time.perf_counter()
        raw, encoded = write_sidecar(checkpoint, folder, lambda done, total: None)
        convert_gbps = raw / (time.perf_counter() - started) / 1e9
        with closing(SidecarTier(open_sidecar(checkpoint, folder), ReadSettings(), True)) as tier:
            assert sum(tier.nbytes(i) for i in range(checkpoint.spec.n_layers)) == encoded
        run = partial(one_run, model, folder, flags.gbps)
        ways = {way: partial(run, way) for way in ("lossless", "raw")}
        runs = interleaved(ways, flags.rounds, warm_up=0)
    (encoded_s, encoded_ids), (raw_s, raw_ids) = (zip(*runs[way], strict=True) for way in ways)
    ratio = Spread.of_ratios(encoded_s, raw_s)
    is_equal = encoded_ids == raw_ids
    random = encode_layer(image, 1)
    speeds = decode_speeds(random, flags.rounds)
    shares = {"model": encoded / raw, "normal": random.encoded.payload_nbytes / image.layout.nbytes}
    print(f"encoded / raw bytes: layers {shares['model']:.4f}, random {shares['normal']:.4f}")
    for name, speed in speeds.items():
        print(f"{name:20} {speed} GB/s of raw bytes, one thread")
    verdict = "yes" if is_equal else "no"
    print(f"pass, encoded / raw  {ratio}, disk paced to {flags.gbps} GB/s; equal tokens: {verdict}")
    print(f"convert              {convert_gbps:.2f} GB/s of raw bytes, with reading and writing")
    bench.finish(bytes=shares, decode_gbps=speeds, pass_ratio=ratio, same_tokens=is_equal)


if __name__ == "__main__":
    main()

"""What do weights without loss cost and save on the link?

`python -m bench.lossless` measures: bytes, encoded to raw, of the demo target expanded to --size
and of normal random weights; GB/s of decoded bytes on one thread, by the C++ and by numba, beside a
copy; passes of one token over a disk whose rate is set to --gbps, so that the link is the limit,
encoded to raw in turn; and whether the tokens are the same. The last line is one JSON object.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from bench.measure import Spread, commit, expanded_model, flag_parser, machine, print_result
from bench.paced import pace
from offload_rt.config import EngineConfig, SamplingParams
from offload_rt.dtypes import DType
from offload_rt.llm import LLM
from offload_rt.offload.disk import ReadSettings
from offload_rt.offload.sidecar import SidecarTier, open_sidecar, write_sidecar
from offload_rt.ops import cpu, lossless, lossless_kernels
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.lossless import EncodedImage, encode_layer

PROMPT = [0, 300, 17, 511, 42]
TOKENS = 6


def random_normal(n: int = 45_000_000) -> PackedLayer:
    """A layer of one matrix, 90 MB."""
    layout = packed_layout([("w", (n,), DType.BFLOAT16)])
    image = PackedLayer(host_block(layout.nbytes), layout)
    image.layout.views(image.block)["w"].copy_(
        torch.randn(n, generator=torch.Generator().manual_seed(0))
    )
    return image


def decode_speeds(image: EncodedImage, rounds: int) -> dict[str, Spread]:
    """GB/s of decoded bytes on one thread, of 90 MB and so beyond caches: each way and a copy of as
    many bytes, in turn.
    """
    out, raw = (host_block(image.encoded.layout.nbytes).fill_(1).numpy() for _ in range(2))
    content = image.block.numpy()
    chunks = image.encoded.chunks.tolist()

    def each(decode: Callable[..., object]) -> Callable[[], None]:
        def all_chunks() -> None:
            for source, target, n, nbytes, kind in chunks:
                decode(content[source : source + nbytes], kind, n, out[target:])

        return all_chunks

    ways: dict[str, Callable[[], object]] = {
        "numba": each(lossless_kernels.decode),
        "numba digest": each(lambda part, *_: lossless_kernels.digest(part)),
        "copy": lambda: out.__setitem__(slice(None), raw),
    }
    if cpu.library() is not None:
        ways |= {
            "c++": each(lossless.decode),
            "c++ digest": each(lambda part, *_: lossless.digest(part)),
        }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            rates[name].append(len(out) / (time.perf_counter() - started) / 1e9)
    return {name: Spread.of(found[1:]) for name, found in rates.items()}


def passes(model: Path, sidecar: Path, gbps: float, rounds: int) -> tuple[Spread, bool]:
    """Seconds of a streamed pass, encoded to raw, pair by pair; and whether all tokens were the
    same.
    """
    seconds: dict[str, list[float]] = {"lossless": [], "raw": []}
    tokens: dict[str, list[list[int]]] = {"lossless": [], "raw": []}
    params = SamplingParams(max_new_tokens=TOKENS)
    for _ in range(rounds):
        for name in ("lossless", "raw"):
            config = EngineConfig(
                str(model),
                device="cpu",
                drafter="none",
                max_model_len=256,
                link_format=name,
                sidecar=str(sidecar),
            )
            with LLM.open(config) as unloaded:
                plan = unloaded.plan
            least = plan.reserved.total + plan.link.buffer + 3 * plan.slot_nbytes
            llm = LLM.open(replace(config, device_memory=least))
            pace(llm, gbps)
            llm.load()
            with llm:
                llm.generate([PROMPT], SamplingParams(max_new_tokens=1))
                started = time.perf_counter()
                output = llm.generate([PROMPT], params)[0]
                seconds[name].append((time.perf_counter() - started) / output.stats.n_passes)
                tokens[name].append(output.token_ids)
    ratios = [one / other for one, other in zip(seconds["lossless"], seconds["raw"], strict=True)]
    return Spread.of(ratios), tokens["lossless"] == tokens["raw"]


def main() -> None:
    """Measure all of it and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="400MB")
    parser.add_argument(
        "--gbps", type=float, default=0.5, help="of the paced disk: a rate at which it is the limit"
    )
    parser.add_argument("--rounds", type=int, default=5)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    model = expanded_model(flags.size)
    image = random_normal()
    print(f"{machine()}; {model.name}; commit {commit()}")
    with TemporaryDirectory(dir=model.parent) as folder:
        checkpoint = open_checkpoint(model)
        started = time.perf_counter()
        raw, encoded = write_sidecar(checkpoint, Path(folder), lambda done, total: None)
        convert_gbps = raw / (time.perf_counter() - started) / 1e9
        with closing(
            SidecarTier(open_sidecar(checkpoint, Path(folder)), ReadSettings(), True)
        ) as tier:
            assert sum(tier.nbytes(i) for i in range(checkpoint.spec.n_layers)) == encoded
        ratio, same = passes(model, Path(folder), flags.gbps, flags.rounds)
    random = encode_layer(image, 1)
    speeds = decode_speeds(random, flags.rounds)
    shares = {"model": encoded / raw, "normal": random.encoded.payload_nbytes / image.layout.nbytes}
    print(
        f"bytes, encoded to raw       {shares['model']:.4f} of the layers, {shares['normal']:.4f}"
        " of normal random weights"
    )
    for name, speed in speeds.items():
        print(f"{name:27} {speed} GB/s of raw bytes, one thread")
    print(
        f"pass, encoded to raw        {ratio}, disk paced to {flags.gbps} GB/s; same tokens:"
        f" {'yes' if same else 'no'}"
    )
    print(
        f"convert                     {convert_gbps:.2f} GB/s of raw bytes, with reading and"
        " writing"
    )
    found = {name: speed.median for name, speed in speeds.items()}
    print_result(
        "lossless", flags, bytes=shares, decode_gbps=found, of_pass=ratio.median, same_tokens=same
    )


if __name__ == "__main__":
    main()

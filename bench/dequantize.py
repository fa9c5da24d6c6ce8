"""How fast are quantised weights made plain on a CPU, and does a link still set the time of a pass that does so?

    python -m bench.dequantize [--formats int4 GGUF] [--rounds 7] [--rates 0.25,0.5,1]

One thread throughout. First, for each format, a matrix of 4096 x 11008 to bfloat16: billions of weights a second by the kernel,
by torch's own operations, and by a copy of a bfloat16 matrix, interleaved. Then a pass of one token over a Llama of 4-bit
integers, whose layers are read from the disk and held back to a set rate, against the time that its bytes take at that rate.
Without rates there is no such pass. The last line is one JSON object.
"""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from bench.measure import ROOT, Spread, commit, flag_parser, machine, print_result
from bench.paced import PacedTier
from bench.stream import Passes
from offload_rt.llm import LLM
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.streamer import LayerSources
from offload_rt.ops.dequantize import (
    BLOCKS,
    KERNEL_BLOCKS,
    Packing,
    dequantize,
    dequantize_blocks,
    reference_dequantize,
    reference_dequantize_blocks,
)
from offload_rt.weights.checkpoint import open_checkpoint

N_OUT, N_IN = 4096, 11008
N_LAYERS, GROUP = 8, 128
# Packing and dtype of the codes, dtype of the scales.
PACKINGS = {
    "int4, groups of 128": (Packing("rows", 4, (1, GROUP), 8), torch.int32, torch.bfloat16),
    "int8 rows": (Packing("plain", 8, (1, N_IN)), torch.int8, torch.bfloat16),
    "float8, blocks of 128": (Packing("plain", 8, (128, 128)), torch.float8_e4m3fn, torch.float32),
    "AWQ": (Packing("awq", 4, (GROUP, 1)), torch.int32, torch.float16),
    "GPTQ, 4 bits": (Packing("columns", 4, (GROUP, 1)), torch.int32, torch.float16),
    "nf4": (Packing("nf4", 4, (1, 64)), torch.uint8, torch.float32),
    "MXFP4": (Packing("e2m1", 4, (1, 32)), torch.uint8, torch.bfloat16),
}
Way = Callable[[], object]


def ways() -> dict[str, tuple[Way, Way]]:
    """For each format the kernel, and torch's operations."""
    out, found = torch.empty(N_OUT, N_IN, dtype=torch.bfloat16), {}
    for name, (packing, dtype, scale_dtype) in PACKINGS.items():
        codes = torch.randint(-100, 100, packing.words(N_OUT, N_IN)).to(torch.int8 if dtype.itemsize == 1 else dtype)
        grid = [-(-n // size) for n, size in zip((N_OUT, N_IN), packing.block, strict=True)]
        codes = codes.view(dtype) if dtype.itemsize == 1 else codes
        args = (codes, torch.rand(grid).to(scale_dtype), None, None, packing, out)
        found[name] = partial(dequantize, *args), partial(reference_dequantize, *args)
    for name in KERNEL_BLOCKS:
        block = BLOCKS[name]
        args = (torch.randint(100, (N_OUT, N_IN // block.n * block.size), dtype=torch.uint8), name, out)
        found[f"GGUF {name}"] = partial(dequantize_blocks, *args), partial(reference_dequantize_blocks, *args)
    return found


def rates(n_rounds: int, formats: list[str]) -> dict[str, dict[str, object]]:
    """Billions of weights a second by kernel, by torch and by a copy, and what the kernel is of the copy in each round."""
    results: dict[str, dict[str, object]] = {}
    plain, copied = (torch.ones(N_OUT, N_IN, dtype=torch.bfloat16) for _ in range(2))
    names = ("kernel", "torch", "copy")
    print(f"\n## Billions of weights a second to bfloat16\n{'':24}{''.join(f'{one:26}' for one in names)}kernel / copy")
    for name, pair in ways().items():
        if not any(name.startswith(one) for one in formats):
            continue
        all_ways = (*pair, lambda: copied.copy_(plain))
        for way in all_ways:
            way()  # compiles
        rounds = [[N_OUT * N_IN / _seconds(way) / 1e9 for way in all_ways] for _ in range(n_rounds)]
        found = {one: Spread.of([each[i] for each in rounds]) for i, one in enumerate(names)}
        found["ratio"] = Spread.of([each[0] / each[2] for each in rounds])
        print(f"{name:24}{''.join(f'{found[one]!s:26}' for one in names)}{found['ratio']}")
        results[name] = {one: asdict(spread) for one, spread in found.items()}
    return results


def _seconds(way: Way) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started


def write_int4(directory: Path) -> None:
    """A Llama of random 4-bit integers, as compressed-tensors stores them."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}}
    config = {
        "model_type": "llama", "vocab_size": 1000, "hidden_size": N_OUT, "intermediate_size": N_IN,
        "num_hidden_layers": N_LAYERS, "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16", "tie_word_embeddings": True, "quantization_config": quantization,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    ones = torch.ones(N_OUT, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": torch.randn(1000, N_OUT).bfloat16(), "model.norm.weight": ones}
    shapes = {f"self_attn.{name}_proj": (N_OUT, N_OUT) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (N_IN, N_OUT), "mlp.up_proj": (N_IN, N_OUT), "mlp.down_proj": (N_OUT, N_IN)}
    for i in range(N_LAYERS):
        prefix = f"model.layers.{i}"
        tensors |= {f"{prefix}.{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
        for name, (n_out, n_in) in shapes.items():
            tensors |= {f"{prefix}.{name}.{part}": tensor for part, tensor in _int4(n_out, n_in).items()}
    save_file(tensors, directory / "model.safetensors")


def _int4(n_out: int, n_in: int) -> dict[str, Tensor]:
    codes = torch.randint(-(2**31), 2**31, (n_out, n_in // 8), dtype=torch.int32)
    scales = torch.full((n_out, n_in // GROUP), 0.2 / n_in**0.5, dtype=torch.bfloat16)
    return {"weight_packed": codes, "weight_scale": scales, "weight_shape": torch.tensor([n_out, n_in])}


def passes_over_a_link(gbps: list[float], n_rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of a pass of one token over those that its bytes take, by the rate of the link."""
    results: dict[str, dict[str, float]] = {}
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "build") as folder:
        write_int4(Path(folder))
        checkpoint = open_checkpoint(Path(folder))
        with LLM(folder, device="cpu", drafter="none") as llm, closing(DiskTier(checkpoint.layers)) as disk:
            nbytes = sum(map(disk.nbytes, range(N_LAYERS)))
            print(
                f"\n## A pass of one token over {nbytes / 1e9:.2f} GB of 4-bit integers / its bytes at the rate of the link"
            )
            for rate in gbps:
                tiers = (PacedTier(disk, rate),) * N_LAYERS
                with closing(Passes(llm.engine.runner, LayerSources(MemoryTier(), tiers, 3), 1)) as passes:
                    passes.seconds()
                    ratio = Spread.of([passes.seconds() / (nbytes / rate / 1e9) for _ in range(n_rounds)])
                print(f"{rate:5.2f} GB/s  {ratio}")
                results[f"{rate} GB/s"] = asdict(ratio)
    return results


def main() -> None:
    """Run both and print one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--formats", nargs="+", default=[""], help="how their names begin; default: all")
    parser.add_argument("--rates", default="0.25,0.5,1", help="of the link, in GB/s")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine()}; commit {commit()}")
    gbps = [float(rate) for rate in flags.rates.split(",") if rate]
    weights_per_s = rates(flags.rounds, flags.formats)
    of_pass = passes_over_a_link(gbps, max(flags.rounds // 2, 2)) if gbps else {}
    print_result("dequantize", flags, weights_per_s=weights_per_s, of_pass=of_pass)


if __name__ == "__main__":
    main()

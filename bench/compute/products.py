"""Products of stored weights as shares of the multiply-add peak and of the memory bandwidth.

Write a checkpoint of a single layer in every format, open it, and multiply through the view of the
model; types of GGUF are random blocks. Copies of the layer, together larger than the caches, are
used in turn.
"""

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from bench.common.measure import ROOT, Spread
from bench.common.peaks import fma_gflops, read_gbps
from bench.common.processes import run_python
from offload_rt.models.layers import LayerWeights
from offload_rt.offload.disk import DiskTier
from offload_rt.offload.tier import read_parallel
from offload_rt.ops.dequantize import BlockMatrix
from offload_rt.ops.linear import linear
from offload_rt.packing import BLOCKS
from offload_rt.system.machine import cache_nbytes
from offload_rt.weights.checkpoint import open_checkpoint
from offload_rt.weights.layout import host_block

ROWS = (1, 8, 64, 128, 256)
HIDDEN = 2048
INTERMEDIATE = 5632
MATRICES = {
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
# The L2 cache of a core holds it in most formats.
CACHED = {"self_attn.q_proj": (256, HIDDEN)}
# Its product is executed in single steps.
TRACED = {"self_attn.k_proj": (128, HIDDEN)}
DENSE = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}
# Flags of scripts/quantize.py. Products of quantised weights are in bfloat16.
QUANTIZED = {
    "int4, groups of 128": ("--format", "pack-quantized", "--group-size", "128"),
    "AWQ": ("--format", "awq", "--group-size", "128"),
    "GPTQ": ("--format", "gptq", "--group-size", "128"),
    "nf4": ("--format", "nf4", "--group-size", "64"),
    "MXFP4": ("--format", "mxfp4-pack-quantized"),
    "block fp8": ("--format", "fp8", "--group-size", "128"),
    "int8": ("--format", "int-quantized", "--group-size", "-1", "--symmetric"),
}
# Types of GGUF have random blocks.
FORMATS = (*DENSE, *QUANTIZED, *BLOCKS)
FOUR_BITS = ("int4, groups of 128", "AWQ", "GPTQ", "nf4", "MXFP4", "Q4_0", "Q4_K")
_LEAST_S = 0.06  # of one measurement
_TIMES_CACHE = 4


@dataclass(frozen=True)
class Weights:
    """Copies of a layer in a format.

    views      views of the copies
    nbytes     stored bytes of the matrices of one copy
    """

    views: tuple[LayerWeights, ...]
    nbytes: int
    dtype: torch.dtype

    def products(self) -> Iterator[tuple[LayerWeights, str]]:
        """Yield matrices endlessly, copy by copy."""
        return itertools.cycle([(view, name) for view in self.views for name in MATRICES])


@dataclass(frozen=True)
class Case:
    """Measured products of a format and row count, per round.

    gflops  rates
    peak    share of the multiply-add peak of the same round
    memory  share of the memory bandwidth of the same round
    """

    gflops: list[float]
    peak: list[float]
    memory: list[float]


def write_layer(folder: Path, dtype: torch.dtype) -> Path:
    """Write a Llama of a single layer with random weights and small attention."""
    out = folder / str(dtype).removeprefix("torch.")
    out.mkdir()
    config = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "torch_dtype": out.name,
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))
    attention = {"q": (256, HIDDEN), "k": (128, HIDDEN), "v": (128, HIDDEN), "o": (HIDDEN, 256)}
    shapes = MATRICES | {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(256, HIDDEN, generator=draw),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for name in ("input", "post_attention"):
        tensors[f"model.layers.0.{name}_layernorm.weight"] = torch.ones(HIDDEN)
    for name, shape in shapes.items():
        tensors[f"model.layers.0.{name}.weight"] = (
            torch.randn(shape, generator=draw) / shape[1] ** 0.5
        )
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, out / "model.safetensors"
    )
    return out


def open_weights(path: Path, dtype: torch.dtype) -> Weights:
    """Read the layer of a checkpoint into enough copies to exceed the caches."""
    checkpoint = open_checkpoint(path)
    with closing(DiskTier(checkpoint.layers)) as tier:
        layout = tier.layout(0)
        block = host_block(layout.nbytes)
        read_parallel(tier.reads(0, block), 1)
    nbytes = sum(entry.nbytes for entry in layout.entries if entry.name.startswith("mlp."))
    blocks = [block]
    while len(blocks) * nbytes < _TIMES_CACHE * cache_nbytes():
        blocks.append(host_block(len(block)).copy_(block))
    return Weights(
        tuple(checkpoint.format.view(layout, block, dtype) for block in blocks), nbytes, dtype
    )


class BlocksView:
    """View of matrices in GGUF blocks."""

    def __init__(self, matrices: Mapping[str, BlockMatrix]) -> None:
        self._matrices = matrices

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix."""
        return linear(x, self._matrices[name])

    def stored(self, name: str) -> tuple[BlockMatrix, None]:
        """Return a matrix and no bias."""
        return self._matrices[name], None

    def rounding(self) -> "BlocksView":
        """Return a view of the same blocks, whose products round their inputs to 8 bits."""
        matrices = self._matrices.items()
        return BlocksView({name: replace(each, rounds_inputs=True) for name, each in matrices})


def random_blocks(name: str) -> Weights:
    """Draw matrices of a GGUF type with scales below 1, in enough copies to exceed the caches."""
    block = BLOCKS[name]
    matrices = {}
    for key, (n_out, n_in) in (MATRICES | CACHED | TRACED).items():
        blocks = torch.randint(256, (n_out, n_in // block.n, block.size), dtype=torch.uint8)
        for offset in (block.scale, block.minimum):
            if offset is not None:
                blocks[:, :, offset + 1] &= 0x3B  # the upper byte of a float16
        matrices[key] = BlockMatrix((n_out, n_in), blocks.view(n_out, -1), name)
    nbytes = sum(matrices[key].blocks.nbytes for key in MATRICES)
    views = []
    while not views or len(views) * nbytes < _TIMES_CACHE * cache_nbytes():
        copies = {
            key: replace(matrix, blocks=matrix.blocks.clone()) for key, matrix in matrices.items()
        }
        views.append(BlocksView(copies))
    return Weights(tuple(views), nbytes, torch.bfloat16)


def all_weights(folder: Path, names: Sequence[str]) -> dict[str, Weights]:
    """Return the matrices in each format."""
    plain = {name: write_layer(folder, dtype) for name, dtype in DENSE.items()}
    weights_by_format = {}
    for name in names:
        if name in DENSE:
            weights_by_format[name] = open_weights(plain[name], DENSE[name])
            continue
        if name in BLOCKS:
            weights_by_format[name] = random_blocks(name)
            continue
        out = folder / f"layer-{len(weights_by_format)}"
        run_python("scripts/quantize.py", str(plain["bf16"]), str(out), *QUANTIZED[name])
        weights_by_format[name] = open_weights(out, torch.bfloat16)
    return weights_by_format


def measure(
    weights: Mapping[str, Weights], n_rounds: int
) -> tuple[dict[str, dict[int, Case]], list[float], list[float]]:
    """Measure all cases, interleaved, with the peaks and bandwidths of the rounds."""
    cases = {name: {n: Case([], [], []) for n in ROWS} for name in weights}
    products = {name: each.products() for name, each in weights.items()}
    peaks = []
    bandwidths = []
    for i in range(n_rounds + 1):
        peak = fma_gflops()
        bandwidth = read_gbps()
        for name, by_rows in cases.items():
            for n, case in by_rows.items():
                gflops = _gflops(products[name], n, weights[name].dtype)
                if i == 0:  # the first round warms up
                    continue
                case.gflops.append(gflops)
                case.peak.append(gflops / peak)
                seconds = _flops(n) / gflops / 1e9
                case.memory.append(weights[name].nbytes / seconds / 1e9 / bandwidth)
        if i > 0:
            peaks.append(peak)
            bandwidths.append(bandwidth)
    return cases, peaks, bandwidths


def _flops(n_rows: int) -> int:
    return sum(2 * n_rows * n_out * n_in for n_out, n_in in MATRICES.values())


def _gflops(products: Iterator[tuple[LayerWeights, str]], n_rows: int, dtype: torch.dtype) -> float:
    """Return the rate of products of whole copies during at least _LEAST_S seconds."""
    inputs = {name: torch.randn(n_rows, n_in).to(dtype) for name, (_, n_in) in MATRICES.items()}
    started = time.perf_counter()
    n_copies = 0
    elapsed = 0.0
    while elapsed < _LEAST_S:
        for view, name in itertools.islice(products, len(MATRICES)):
            view.linear(inputs[name], name)
        n_copies += 1
        elapsed = time.perf_counter() - started
    return n_copies * _flops(n_rows) / elapsed / 1e9


class TorchView:
    """View of dense weights with torch's product."""

    def __init__(self, view: LayerWeights) -> None:
        self._view = view

    def linear(self, x: Tensor, name: str) -> Tensor:
        """Multiply by torch."""
        return F.linear(x, self._view.tensor(f"{name}.weight"))


def by_torch(weights: Weights) -> Weights:
    """Return the same copies with torch's product."""
    return replace(weights, views=tuple(map(TorchView, weights.views)))


def summary(cases: Mapping[str, Mapping[int, Case]]) -> dict[str, Spread]:
    """Return ratios between formats and row counts, round by round."""
    ratios = {}
    for name in (name for name in FOUR_BITS if name in cases and "bf16" in cases):
        pairs = zip(cases[name][1].gflops, cases["bf16"][1].gflops, strict=True)
        ratios[f"1 row, {name} against bf16"] = Spread.of([mine / bf16 for mine, bf16 in pairs])
    for name, by_rows in cases.items():
        pairs = zip(by_rows[1].gflops, by_rows[8].gflops, strict=True)
        ratios[f"time of 8 rows against 1 row, {name}"] = Spread.of(
            [8 * single / eight for single, eight in pairs]
        )
    return ratios


def report(names: Sequence[str], n_rounds: int, rounds_inputs: bool) -> dict[str, object]:
    """Measure formats and torch's product; print shares, ratios and ceilings.

    rounds_inputs  measure types of GGUF also with rounded inputs
    """
    (ROOT / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=ROOT / "build") as folder:
        weights = all_weights(Path(folder), names)
    weights |= {f"{name} by torch": by_torch(weights[name]) for name in DENSE if name in weights}
    for name in [name for name in weights if rounds_inputs and name in BLOCKS]:
        views = tuple(view.rounding() for view in weights[name].views)
        weights[f"{name}, int8"] = replace(weights[name], views=views)
    cases, peaks, bandwidths = measure(weights, n_rounds)
    print(
        f"peak {Spread.of(peaks)} GFLOP/s of float32, memory {Spread.of(bandwidths)} GB/s,"
        f" {n_rounds} rounds"
    )
    print(
        "\nshare of the peak by rows, and of the memory bandwidth for one row: median (least to"
        " largest)"
    )
    print(f"{'':20}{'1 row, memory':>20}" + "".join(f"{f'{n} rows':>20}" for n in ROWS))
    for name, by_rows in cases.items():
        shares = [by_rows[1].memory, *(case.peak for case in by_rows.values())]
        print(f"{name:20}" + "".join(f"{_short(share):>20}" for share in shares))
    ratios = summary(cases)
    print("\n" + "\n".join(f"{what:48}{ratio}" for what, ratio in ratios.items()))
    return {
        "peak_gflops": peaks,
        "memory_gbps": bandwidths,
        "products": {
            name: {n: asdict(case) for n, case in by_rows.items()}
            for name, by_rows in cases.items()
        },
        "ratios": {what: asdict(ratio) for what, ratio in ratios.items()},
    }


def _short(shares: Sequence[float]) -> str:
    spread = Spread.of(shares)
    return f"{spread.median:.2f} ({spread.least:.2f} to {spread.largest:.2f})"

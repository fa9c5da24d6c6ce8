"""Write a small quantised checkpoint, for tests and demonstrations; rounds to nearest.

    python scripts/quantize.py models/demo-target build/demo-gptq --format gptq --group-size 64
    python scripts/quantize.py models/demo-target build/demo.gguf --format gguf --type Q4_K

Formats follow their specifications bit by bit, independently of the code that reads them.
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import write_gguf
from safetensors.torch import load_file, save_file
from torch import Tensor

# Column, of eight, in each nibble of AutoAWQ's words.
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
NORMAL4 = torch.tensor([
    -1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0,
    0.0795803, 0.1609302, 0.2461123,
    0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
])  # fmt: skip
_INDEX = "model.safetensors.index.json"
_MATRIX = re.compile(r".*_proj\.weight")


@dataclass(frozen=True)
class Choice:
    """Format and settings; a group_size of -1 means a scale per row."""

    format: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    desc_act: bool = False


@dataclass(frozen=True)
class Integers:
    """Matrix (n_out, n_in) as scale * (code - zero).

    codes          (n_out, n_in) int64, 0 to 2^bits - 1
    scales, zeros  (n_out, n_groups); zeros int64
    groups         (n_in,) int64
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def weight(self) -> Tensor:
        """Return the matrix, computed in the dtype of the scales."""
        steps = (self.codes - self.zeros[:, self.groups]).to(self.scales.dtype)
        return steps * self.scales[:, self.groups]


def integers(weight: Tensor, choice: Choice, dtype: torch.dtype) -> Integers:
    """Round a matrix to the nearest steps of its groups; desc_act shuffles the inputs."""
    n_in = weight.shape[1]
    size = choice.group_size if choice.group_size > 0 else weight.shape[1]
    order = (
        torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in))
        if choice.desc_act
        else torch.arange(n_in)
    )
    groups = torch.empty(n_in, dtype=torch.int64)
    groups[order] = torch.arange(n_in) // size
    largest = 2**choice.bits - 1
    middle = 2 ** (choice.bits - 1)
    parts = [weight[:, groups == g].float() for g in range(int(groups.max()) + 1)]
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    scales = (
        torch.maximum(high, -low) / max(middle - 1, 1)
        if choice.symmetric
        else (high - low) / largest
    ).clamp(min=1e-6)
    zeros = torch.full_like(scales, middle) if choice.symmetric else (-low / scales).round()
    scales = scales.to(dtype)
    codes = (
        (weight.float() / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, largest)
    )
    return Integers(codes.long(), scales, zeros.long(), groups)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack numbers (rows, n) below 2^bits into dense int32 (rows, words), low bits first."""
    digits = (codes.numpy()[:, :, None] >> np.arange(bits)) & 1
    flat = digits.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view(np.int32).copy())


def pack_awq(codes: Tensor) -> Tensor:
    """Pack numbers (rows, n) into words of eight, in the order of AutoAWQ."""
    return pack(codes.view(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(len(codes), -1), 4)


Quantized = tuple[dict[str, Tensor], Tensor]


def packed(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as compressed-tensors, pack-quantized."""
    matrix = integers(weight, choice, weight.dtype)
    tensors = {"weight_packed": pack(matrix.codes, choice.bits), "weight_scale": matrix.scales}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not choice.symmetric:
        tensors["weight_zero_point"] = pack(matrix.zeros.T, choice.bits).T.contiguous()
    if choice.desc_act:
        tensors["weight_g_idx"] = matrix.groups.int()
    return tensors, matrix.weight()


def plain_int8(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as compressed-tensors, int-quantized."""
    matrix = integers(
        weight, Choice(choice.format, 8, choice.group_size, choice.symmetric), weight.dtype
    )
    tensors = {"weight": (matrix.codes - 128).to(torch.int8), "weight_scale": matrix.scales}
    if not choice.symmetric:
        tensors["weight_zero_point"] = (matrix.zeros - 128).to(torch.int8)
    return tensors, matrix.weight()


def float8(
    weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return codes for these scales, and their values in `dtype`."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    codes = (weight.float() / spread.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.to(dtype) * spread.to(dtype)


def row_float8(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as compressed-tensors, float-quantized, with a scale per row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).to(weight.dtype)
    codes, exact = float8(weight, scales, (1, weight.shape[1]), weight.dtype)
    return {"weight": codes, "weight_scale": scales}, exact


def block_float8(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as fp8: a float32 scale per block of group_size rows and columns."""
    size = choice.group_size
    n_rows, n_columns = (-(-n // size) for n in weight.shape)
    whole = torch.zeros(n_rows * size, n_columns * size)
    whole[: weight.shape[0], : weight.shape[1]] = weight.float()
    scales = whole.view(n_rows, size, n_columns, size).abs().amax((1, 3)) / 448
    codes, exact = float8(weight, scales, (size, size), torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, exact


def mxfp4(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as compressed-tensors, mxfp4-pack-quantized: a power of two per 32 weights."""
    parts = weight.float().view(len(weight), -1, 32)
    exponents = parts.abs().amax(2).clamp(min=1e-30).log2().floor() - 2
    steps = parts / exponents.exp2()[:, :, None]
    codes = (steps.abs()[..., None] - FLOAT4).abs().argmin(-1) + 8 * (steps < 0)
    exact = FLOAT4[codes % 8] * (1 - 2 * (codes // 8)) * exponents.exp2()[:, :, None]
    pairs = codes.view(len(weight), -1, 2)
    tensors = {
        "weight_packed": (pairs[..., 0] | pairs[..., 1] << 4).byte(),
        "weight_scale": (exponents + 127).byte(),
    }
    return tensors, exact.view(weight.shape)


def awq(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as AutoAWQ, gemm."""
    matrix = integers(weight, choice, torch.float16)
    tensors = {
        "qweight": pack_awq(matrix.codes.T),
        "qzeros": pack_awq(matrix.zeros.T),
        "scales": matrix.scales.T.contiguous(),
    }
    return tensors, matrix.weight()


def gptq(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as AutoGPTQ and GPTQModel; the first version stores zero points minus 1."""
    matrix = integers(weight, choice, torch.float16)
    bits = choice.bits
    zeros = matrix.zeros if choice.format == "gptq_v2" else (matrix.zeros - 1) % 2**bits
    tensors = {
        "qweight": pack(matrix.codes, bits).T.contiguous(), "qzeros": pack(zeros.T, bits),
        "scales": matrix.scales.T.contiguous(), "g_idx": matrix.groups.int(),
    }  # fmt: skip
    return tensors, matrix.weight()


def nf4(weight: Tensor, choice: Choice) -> Quantized:
    """Quantise as bitsandbytes nf4 in blocks of group_size, with 8-bit scales unless symmetric."""
    blocks = weight.float().view(-1, choice.group_size)
    scales = blocks.abs().amax(1).clamp(min=1e-12)
    extra = {}
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": choice.group_size,
        "shape": list(weight.shape),
    }
    state["dtype"] = str(weight.dtype).removeprefix("torch.")
    if not choice.symmetric:
        offset = float(scales.mean())
        table = torch.linspace(-1, 1, 256) ** 3
        rest = scales - offset
        parts = torch.nn.functional.pad(rest, (0, -len(rest) % 256)).view(-1, 256)
        steps = parts.abs().amax(1).clamp(min=1e-12)
        codes = (
            (parts / steps[:, None])[..., None].sub(table).abs().argmin(-1).view(-1)[: len(rest)]
        )
        scales = table[codes] * steps.repeat_interleave(256)[: len(rest)] + offset
        extra = {
            "weight.absmax": codes.byte(),
            "weight.nested_absmax": steps,
            "weight.nested_quant_map": table,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = (blocks / scales[:, None])[..., None].sub(NORMAL4).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).byte(), "weight.absmax": scales,
        "weight.quant_map": NORMAL4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()),
            dtype=torch.uint8), **extra,
    }  # fmt: skip
    return tensors, (NORMAL4[codes] * scales[:, None]).view(weight.shape)


FORMATS: dict[str, Callable[[Tensor, Choice], Quantized]] = {
    "pack-quantized": packed, "int-quantized": plain_int8, "float-quantized": row_float8,
    "mxfp4-pack-quantized": mxfp4,
    "fp8": block_float8, "awq": awq, "gptq": gptq, "gptq_v2": gptq, "nf4": nf4,
}  # fmt: skip


def config_of(choice: Choice) -> dict[str, Any]:
    """Return the quantization_config."""
    bits = choice.bits
    size = choice.group_size
    symmetric = choice.symmetric
    if choice.format == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [size, size],
        }
    if choice.format == "nf4":
        kind = {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": not symmetric,
        }
        return {"quant_method": "bitsandbytes", "bnb_4bit_quant_storage": "uint8", **kind}
    if choice.format == "awq":
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
        }
    if choice.format.startswith("gptq"):
        common = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": symmetric}
        return {
            **common,
            "desc_act": choice.desc_act,
            "checkpoint_format": choice.format,
            "lm_head": False,
        }
    group = {"strategy": "group", "group_size": size} if size > 0 else {"strategy": "channel"}
    integer = {"num_bits": bits, "type": "int", "symmetric": symmetric, **group}
    weights = {
        "int-quantized": {**integer, "num_bits": 8},
        "float-quantized": {
            "num_bits": 8,
            "type": "float",
            "symmetric": True,
            "strategy": "channel",
        },
        "mxfp4-pack-quantized": {
            "num_bits": 4,
            "type": "float",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
        },
    }.get(choice.format, integer | ({"actorder": "group"} if choice.desc_act else {}))
    config_group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": choice.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": config_group}, "ignore": ["lm_head"],
    }  # fmt: skip


def quantized(
    tensors: dict[str, Tensor], choice: Choice
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a quantised checkpoint, and of an equivalent plain checkpoint."""
    stored = {}
    exact = {}
    for name, tensor in tensors.items():
        if not _MATRIX.fullmatch(name):
            stored[name] = exact[name] = tensor
            continue
        parts, exact[name] = FORMATS[choice.format](tensor, choice)
        stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    return stored, exact


def write(source: Path, target: Path, choice: Choice, exact: Path | None = None) -> None:
    """Quantise a checkpoint into a new folder; copy all further files.

    exact  folder for an equivalent plain checkpoint
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    folders = {target: {"quantization_config": config_of(choice)}} | (
        {} if exact is None else {exact: {}}
    )
    for folder, more in folders.items():
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / "config.json").write_text(json.dumps(config | more, indent=2), encoding="utf-8")
    shards: dict[Path, dict[str, str]] = {folder: {} for folder in folders}
    for path in sorted(source.glob("*.safetensors")):
        for folder, tensors in zip(folders, quantized(load_file(path), choice), strict=False):
            save_file(tensors, folder / path.name, {"format": "pt"})
            shards[folder] |= dict.fromkeys(tensors, path.name)
    if (source / _INDEX).exists():
        for folder, names in shards.items():
            (folder / _INDEX).write_text(
                json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8"
            )


def write_one_file(source: Path, target: Path, type: str) -> None:
    """Write a checkpoint as a GGUF file, with its tokenizer if byte-level."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    metadata = write_gguf.metadata_of(config)
    stored = {}
    if (source / "tokenizer.json").exists():
        metadata |= write_gguf.tokenizer(source / "tokenizer.json")
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            file_name, encoded, _ = write_gguf.convert(config, name, tensor, type)
            stored[file_name] = encoded
    with target.open("wb") as file:
        file.writelines(write_gguf.file_parts(metadata, stored))


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a checkpoint")
    parser.add_argument("target", type=Path, help="folder or GGUF file to write")
    parser.add_argument("--format", choices=[*FORMATS, "gguf"], default="pack-quantized")
    parser.add_argument("--bits", type=int, choices=range(2, 9), default=4)
    parser.add_argument("--group-size", type=int, default=32, help="inputs per scale; -1 for all")
    parser.add_argument(
        "--symmetric", action="store_true", help="without zero points; nf4: plain scales"
    )
    parser.add_argument(
        "--type", choices=write_gguf.TYPES, default="Q4_K", help="type of a GGUF file's matrices"
    )
    parser.add_argument("--desc-act", action="store_true", help="groups of arbitrary inputs")
    parser.add_argument("--exact", type=Path, help="folder for an equivalent plain checkpoint")
    args = parser.parse_args()
    if args.target.exists() or not any(args.source.glob("*.safetensors")):
        print(f"{args.target} exists, or {args.source} has no safetensors", file=sys.stderr)
        return 2
    if args.format == "gguf":
        write_one_file(args.source, args.target, args.type)
        return 0
    choice = Choice(args.format, args.bits, args.group_size, args.symmetric, args.desc_act)
    write(args.source, args.target, choice, args.exact)
    return 0


if __name__ == "__main__":
    sys.exit(main())

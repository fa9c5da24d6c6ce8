"""Write a small checkpoint quantised as others publish them, for tests and demonstrations: weights
are rounded to nearest.

    python scripts/quantize.py models/demo-target build/demo-gptq --format gptq --bits 4
    --group-size 64 python scripts/quantize.py models/demo-target build/demo.gguf --format gguf
    --type Q4_K

The formats are written by their specifications, bit by bit, and not by the code that reads them.
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

# Nibble p of a word of AutoAWQ holds this column of eight.
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
    """A format and its settings. A group_size of -1: one scale for a row."""

    format: str
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    desc_act: bool = False


@dataclass(frozen=True)
class Integers:
    """A matrix (n_out, n_in) as scale * (code - zero).

    codes          (n_out, n_in) int64, 0 to 2^bits - 1
    scales, zeros  (n_out, n_groups); zeros int64
    groups         (n_in,) int64
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    groups: Tensor

    def weight(self) -> Tensor:
        """The matrix, computed in the dtype of the scales."""
        steps = (self.codes - self.zeros[:, self.groups]).to(self.scales.dtype)
        return steps * self.scales[:, self.groups]


def integers(weight: Tensor, choice: Choice, dtype: torch.dtype) -> Integers:
    """Round a matrix to the nearest steps of its groups; with desc_act the inputs of a group lie
    anywhere.
    """
    n_in = weight.shape[1]
    size = choice.group_size if choice.group_size > 0 else weight.shape[1]
    order = (
        torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in))
        if choice.desc_act
        else torch.arange(n_in)
    )
    groups = torch.empty(n_in, dtype=torch.int64)
    groups[order] = torch.arange(n_in) // size
    most = 2**choice.bits - 1
    middle = 2 ** (choice.bits - 1)
    parts = [weight[:, groups == g].float() for g in range(int(groups.max()) + 1)]
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    scales = (
        torch.maximum(high, -low) / max(middle - 1, 1) if choice.symmetric else (high - low) / most
    ).clamp(min=1e-6)
    zeros = torch.full_like(scales, middle) if choice.symmetric else (-low / scales).round()
    scales = scales.to(dtype)
    codes = (weight.float() / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return Integers(codes.long(), scales, zeros.long(), groups)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits (rows, n) densely in int32 (rows, words), low bits first."""
    each = (codes.numpy()[:, :, None] >> np.arange(bits)) & 1
    flat = each.reshape(len(codes), -1).astype(np.uint8)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view(np.int32).copy())


def pack_awq(codes: Tensor) -> Tensor:
    """(rows, n) in words of eight, in the order of AutoAWQ."""
    return pack(codes.view(len(codes), -1, 8)[:, :, AWQ_ORDER].reshape(len(codes), -1), 4)


Quantized = tuple[dict[str, Tensor], Tensor]


def packed(weight: Tensor, choice: Choice) -> Quantized:
    """compressed-tensors, pack-quantized."""
    own = integers(weight, choice, weight.dtype)
    tensors = {"weight_packed": pack(own.codes, choice.bits), "weight_scale": own.scales}
    tensors["weight_shape"] = torch.tensor(weight.shape)
    if not choice.symmetric:
        tensors["weight_zero_point"] = pack(own.zeros.T, choice.bits).T.contiguous()
    if choice.desc_act:
        tensors["weight_g_idx"] = own.groups.int()
    return tensors, own.weight()


def plain_int8(weight: Tensor, choice: Choice) -> Quantized:
    """compressed-tensors, int-quantized."""
    own = integers(
        weight, Choice(choice.format, 8, choice.group_size, choice.symmetric), weight.dtype
    )
    tensors = {"weight": (own.codes - 128).to(torch.int8), "weight_scale": own.scales}
    if not choice.symmetric:
        tensors["weight_zero_point"] = (own.zeros - 128).to(torch.int8)
    return tensors, own.weight()


def float8(
    weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The codes for these scales, and what they stand for, computed in `dtype`."""
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[
        : weight.shape[0], : weight.shape[1]
    ]
    codes = (weight.float() / spread.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.to(dtype) * spread.to(dtype)


def row_float8(weight: Tensor, choice: Choice) -> Quantized:
    """compressed-tensors, float-quantized, a scale for each row."""
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).to(weight.dtype)
    codes, exact = float8(weight, scales, (1, weight.shape[1]), weight.dtype)
    return {"weight": codes, "weight_scale": scales}, exact


def block_float8(weight: Tensor, choice: Choice) -> Quantized:
    """A float32 scale for each block of group_size rows and columns, the last of which may be
    cut.
    """
    size = choice.group_size
    n_rows, n_columns = (-(-n // size) for n in weight.shape)
    whole = torch.zeros(n_rows * size, n_columns * size)
    whole[: weight.shape[0], : weight.shape[1]] = weight.float()
    scales = whole.view(n_rows, size, n_columns, size).abs().amax((1, 3)) / 448
    codes, exact = float8(weight, scales, (size, size), torch.float32)
    return {"weight": codes, "weight_scale_inv": scales}, exact


def mxfp4(weight: Tensor, choice: Choice) -> Quantized:
    """compressed-tensors, mxfp4-pack-quantized: groups of 32 with a power of two each."""
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
    """AutoAWQ, gemm."""
    own = integers(weight, choice, torch.float16)
    tensors = {
        "qweight": pack_awq(own.codes.T),
        "qzeros": pack_awq(own.zeros.T),
        "scales": own.scales.T.contiguous(),
    }
    return tensors, own.weight()


def gptq(weight: Tensor, choice: Choice) -> Quantized:
    """AutoGPTQ and GPTQModel; the first version stores zero points less one."""
    own = integers(weight, choice, torch.float16)
    bits = choice.bits
    zeros = own.zeros if choice.format == "gptq_v2" else (own.zeros - 1) % 2**bits
    tensors = {
        "qweight": pack(own.codes, bits).T.contiguous(), "qzeros": pack(zeros.T, bits),
        "scales": own.scales.T.contiguous(), "g_idx": own.groups.int(),
    }  # fmt: skip
    return tensors, own.weight()


def nf4(weight: Tensor, choice: Choice) -> Quantized:
    """bitsandbytes in 4 bits, blocks of group_size; their scales are of 8 bits, unless the choice
    is symmetric.
    """
    blocks = weight.float().view(-1, choice.group_size)
    scales = blocks.abs().amax(1).clamp(min=1e-12)
    extra = {}
    note: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": choice.group_size,
        "shape": list(weight.shape),
    }
    note["dtype"] = str(weight.dtype).removeprefix("torch.")
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
        note |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    codes = (blocks / scales[:, None])[..., None].sub(NORMAL4).abs().argmin(-1)
    pairs = codes.view(-1, 2)
    tensors = {
        "weight": (pairs[:, :1] << 4 | pairs[:, 1:]).byte(), "weight.absmax": scales,
        "weight.quant_map": NORMAL4.clone(),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(note).encode()),
            dtype=torch.uint8), **extra,
    }  # fmt: skip
    return tensors, (NORMAL4[codes] * scales[:, None]).view(weight.shape)


FORMATS: dict[str, Callable[[Tensor, Choice], Quantized]] = {
    "pack-quantized": packed, "int-quantized": plain_int8, "float-quantized": row_float8,
    "mxfp4-pack-quantized": mxfp4,
    "fp8": block_float8, "awq": awq, "gptq": gptq, "gptq_v2": gptq, "nf4": nf4,
}  # fmt: skip


def config_of(choice: Choice) -> dict[str, Any]:
    """The quantization_config."""
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
    one = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": choice.format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": one}, "ignore": ["lm_head"],
    }  # fmt: skip


def quantized(
    tensors: dict[str, Tensor], choice: Choice
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a quantised checkpoint, and those of a plain one that computes the same."""
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
    """Quantise a checkpoint into a new folder, with all that lies beside its weights.

    exact  a folder for a plain checkpoint that computes the same
    """
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    folders = {target: {"quantization_config": config_of(choice)}} | (
        {} if exact is None else {exact: {}}
    )
    for folder, more in folders.items():
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / "config.json").write_text(json.dumps(config | more, indent=2), encoding="utf-8")
    where: dict[Path, dict[str, str]] = {folder: {} for folder in folders}
    for path in sorted(source.glob("*.safetensors")):
        for folder, tensors in zip(folders, quantized(load_file(path), choice), strict=False):
            save_file(tensors, folder / path.name, {"format": "pt"})
            where[folder] |= dict.fromkeys(tensors, path.name)
    if (source / _INDEX).exists():
        for folder, names in where.items():
            (folder / _INDEX).write_text(
                json.dumps({"metadata": {}, "weight_map": names}), encoding="utf-8"
            )


def write_one_file(source: Path, target: Path, type: str) -> None:
    """Write a checkpoint as one GGUF file, with its tokenizer if that is byte-level."""
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
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a checkpoint")
    parser.add_argument("target", type=Path, help="folder or GGUF file to make")
    parser.add_argument("--format", choices=[*FORMATS, "gguf"], default="pack-quantized")
    parser.add_argument("--bits", type=int, choices=range(2, 9), default=4)
    parser.add_argument(
        "--group-size", type=int, default=32, help="inputs that share a scale; -1: all"
    )
    parser.add_argument(
        "--symmetric", action="store_true", help="without zero points; nf4: plain scales"
    )
    parser.add_argument(
        "--type", choices=write_gguf.TYPES, default="Q4_K", help="of a GGUF file's matrices"
    )
    parser.add_argument("--desc-act", action="store_true", help="inputs of a group lie anywhere")
    parser.add_argument(
        "--exact", type=Path, help="folder to make of a plain checkpoint of the same weights"
    )
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

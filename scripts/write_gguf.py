"""Write GGUF files of Llama and Qwen models from the specification, independently of the reader;
round to nearest.
"""

import itertools
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_UINT32 = struct.pack("<I", 4)
_INT32 = struct.pack("<I", 5)
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
ALIGNMENT = 32
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MODULES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps", "mlp.experts.down_proj": "ffn_down_exps",
}  # fmt: skip
_KEYS = {
    "max_position_embeddings": "context_length", "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}  # fmt: skip
_EXPERT_KEYS = {
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_FAMILIES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}
# Modules with more bits in llama.cpp's mixtures called M.
_FINER = ("attn_v", "ffn_down", "ffn_down_exps", "output")


class Stored(NamedTuple):
    """Tensor of a file: number of its type, shape, bytes."""

    type: int
    shape: tuple[int, ...]
    data: bytes


def text(words: str) -> bytes:
    """Encode a string."""
    return struct.pack("<Q", len(words.encode())) + words.encode()


def value(content: Any) -> bytes:
    """Encode a metadata value behind its type.

    Integers are uint32. Integers of arrays are int32: llama.cpp reads token types as int32 only.
    """
    if isinstance(content, list):
        parts = [value(item) for item in content]
        kind = parts[0][:4] if parts else _UINT32
        kind = _INT32 if kind == _UINT32 else kind
        return (
            struct.pack("<I", 9)
            + kind
            + struct.pack("<Q", len(parts))
            + b"".join(part[4:] for part in parts)
        )
    for kind, number, form in ((bool, 7, "<?"), (int, 4, "<I"), (float, 6, "<f")):
        if isinstance(content, kind):
            return struct.pack("<I", number) + struct.pack(form, content)
    return struct.pack("<I", 8) + text(content)


def file_parts(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> Iterator[bytes]:
    """Yield the header of a version 3 file, then its tensors with their padding."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(text(key) + value(content) for key, content in metadata.items())
    offset = 0
    for name, (kind, shape, content) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, offset)
        offset += len(content) + -len(content) % ALIGNMENT
    yield head + bytes(-len(head) % ALIGNMENT)
    for stored in tensors.values():
        yield stored.data
        yield bytes(-len(stored.data) % ALIGNMENT)


def file_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored]) -> bytes:
    """Join the parts of a file."""
    return b"".join(file_parts(metadata, tensors))


def blocks(weight: Tensor, type: str) -> tuple[np.ndarray, Tensor]:
    """Encode a matrix (rows, columns); return its bytes, and its values in float32."""
    if type in _FLOATS:
        stored = weight.to(_FLOATS[type]).contiguous()
        return stored.view(torch.uint8).numpy(), stored.float()
    encode = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}[type]
    parts, exact = encode(
        weight.float().numpy().reshape(-1, 32 if type in ("Q8_0", "Q4_0") else 256)
    )
    return np.concatenate(parts, 1).reshape(len(weight), -1), torch.from_numpy(exact).view(
        weight.shape
    )


_Encoded = tuple[list[np.ndarray], np.ndarray]


def _half(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float16 as bytes and as float32, away from zero for divisions."""
    half = np.where(np.abs(x) < 1e-7, 1e-7, x).astype(np.float16)
    return half.view(np.uint8), half.astype(np.float32)


def _q8_0(x: np.ndarray) -> _Encoded:
    stored, scale = _half(np.abs(x).max(1, keepdims=True) / 127)
    codes = np.clip(np.rint(x / scale), -127, 127).astype(np.int8)
    return [stored, codes.view(np.uint8)], scale * codes


def _q4_0(x: np.ndarray) -> _Encoded:
    stored, scale = _half(np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1) / -8)
    codes = np.clip(np.rint(x / scale) + 8, 0, 15).astype(np.uint8)
    return [stored, codes[:, :16] | codes[:, 16:] << 4], scale * (codes.astype(np.float32) - 8)


def _q4_k(x: np.ndarray) -> _Encoded:
    heads, codes, exact = _with_minima(x, 15)
    pairs = codes.reshape(-1, 4, 2, 32)
    return [*heads, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], exact


def _q5_k(x: np.ndarray) -> _Encoded:
    heads, codes, exact = _with_minima(x, 31)
    pairs = (codes & 15).reshape(-1, 4, 2, 32)
    fifth = np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]
    return [*heads, fifth, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)], exact


def _with_minima(x: np.ndarray, largest: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Encode blocks of eight groups, with a scale and a minimum of 6 bits per group.

    Returns the first 16 bytes of the blocks in parts, codes (n, 8, 32), and values.
    """
    groups = x.reshape(-1, 8, 32)
    low = -np.minimum(groups.min(2), 0)
    (scale_bytes, scale), (low_bytes, minimum) = (
        _half(part.max(1, keepdims=True) / 63)
        for part in ((groups.max(2).clip(0) + low) / largest, low)
    )
    s = np.clip(np.rint((groups.max(2).clip(0) + low) / largest / scale), 1, 63).astype(np.uint8)
    m = np.clip(np.rint(low / minimum), 0, 63).astype(np.uint8)
    step = (scale * s)[:, :, None]
    offset = (minimum * m)[:, :, None]
    codes = np.clip(np.rint((groups + offset) / step), 0, largest).astype(np.uint8)
    sixes = [
        s[:, :4] | s[:, 4:] >> 4 << 6,
        m[:, :4] | m[:, 4:] >> 4 << 6,
        s[:, 4:] & 15 | (m[:, 4:] & 15) << 4,
    ]
    return [scale_bytes, low_bytes, *sixes], codes, step * codes - offset


def _q6_k(x: np.ndarray) -> _Encoded:
    groups = x.reshape(-1, 16, 16)
    stored, scale = _half(np.abs(groups).max(2).max(1, keepdims=True) / 31 / 127)
    s = np.clip(np.rint(np.abs(groups).max(2) / 31 / scale), 1, 127).astype(np.int8)
    step = (scale * s)[:, :, None]
    codes = np.clip(np.rint(groups / step), -32, 31).astype(np.int8)
    q = (codes + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = np.stack(
        [q[:, :, 0] & 15 | (q[:, :, 2] & 15) << 4, q[:, :, 1] & 15 | (q[:, :, 3] & 15) << 4], 2
    )
    high = q[:, :, 0] >> 4 | q[:, :, 1] >> 4 << 2 | q[:, :, 2] >> 4 << 4 | q[:, :, 3] >> 4 << 6
    return [low.reshape(-1, 128), high.reshape(-1, 64), s.view(np.uint8), stored], step * codes


def stored_as(name: str, tensor: Tensor, wanted: str) -> str:
    """Return the type of a tensor: F32 for vectors, `wanted` for matrices.

    Modules of _FINER have Q6_K in K mixtures. Rows that blocks do not divide have Q8_0 or F16.
    """
    if tensor.dim() == 1 or "ffn_gate_inp" in name:
        return "F32"
    if wanted in ("Q4_K", "Q5_K") and name.split(".")[-2] in _FINER:
        wanted = "Q6_K"
    if wanted.endswith("_K") and tensor.shape[-1] % 256:
        wanted = "Q8_0"
    return wanted if wanted in _FLOATS or tensor.shape[-1] % 32 == 0 else "F16"


def renamed(name: str) -> str:
    """Return the name in a file of a transformers tensor."""
    module, _, kind = name.rpartition(".")
    if module in _MODULES:
        return f"{_MODULES[module]}.{kind}"
    _, _, layer, within = module.split(".", 3)
    return f"blk.{layer}.{_MODULES[within]}.{kind}"


def head_dim_of(config: Mapping[str, Any]) -> int:
    """Return the dimension of an attention head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def metadata_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a llama, qwen2, qwen3, or a mixture of these, with plain rotary embeddings."""
    family = _FAMILIES.get(config["model_type"], config["model_type"])
    head_dim = head_dim_of(config)
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10000.0)
    metadata: dict[str, Any] = {"general.architecture": family, "general.name": "small"}
    metadata |= {f"{family}.{key}": config[name] for name, key in _KEYS.items()}
    metadata |= {
        f"{family}.{key}": config[name] for name, key in _EXPERT_KEYS.items() if name in config
    }
    metadata |= {
        f"{family}.rope.dimension_count": head_dim,
        f"{family}.rope.freq_base": float(theta),
    }
    metadata |= {f"{family}.attention.{name}_length": head_dim for name in ("key", "value")}
    if isinstance(config.get("eos_token_id"), int):
        metadata["tokenizer.ggml.eos_token_id"] = config["eos_token_id"]
    return metadata


def convert(
    config: Mapping[str, Any], name: str, tensor: Tensor, type: str
) -> tuple[str, Stored, Tensor]:
    """Encode a transformers tensor: its name in a file, its bytes, and the encoded weights as
    float32.

    Queries and keys of a llama change the order of their rows.
    llama.cpp rotates neighbouring rows, transformers rows half a head apart.
    """
    file_name = renamed(name)
    head_dim = head_dim_of(config)
    counts = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    is_rotated = config["model_type"] in ("llama", "mixtral")
    n_heads = counts.get(file_name.split(".")[-2]) if is_rotated else None
    kind = stored_as(file_name, tensor, type)
    flat = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor[:, None]
    if n_heads is not None:
        flat = flat.view(n_heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(flat.shape)
    data, values = blocks(flat, kind)
    if n_heads is not None:
        values = values.view(n_heads, head_dim // 2, 2, -1).transpose(1, 2)
    return (
        file_name,
        Stored(TYPES[kind], tuple(tensor.shape), data.tobytes()),
        values.reshape(tensor.shape),
    )


def divided(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Divide a tensor of all experts, as transformers names it, into the matrices of a file."""
    stem, is_experts, kind = name.rpartition("mlp.experts.")
    if not is_experts:
        return {name: tensor}
    kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
    parts = zip(kinds, tensor.chunk(len(kinds), 1), strict=True)
    return {f"{stem}{is_experts}{kind}.weight": part for kind, part in parts}


def model(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], type: str
) -> tuple[dict[str, Any], dict[str, Stored], dict[str, Tensor]]:
    """Convert a whole model: metadata, stored tensors, and the encoded weights by transformers'
    names.
    """
    stored = {}
    exact = {}
    for name, tensor in tensors.items():
        values = []
        for part, matrix in divided(name, tensor).items():
            file_name, encoded, value = convert(config, part, matrix, type)
            stored[file_name] = encoded
            values.append(value)
        exact[name] = torch.cat(values, 1) if len(values) > 1 else values[0]
    return metadata_of(config), stored, exact


def tokenizer(path: Path) -> dict[str, Any]:
    """Return the metadata of the byte-level tokenizer in a tokenizer.json."""
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content["added_tokens"]}
    ids = {**content["model"]["vocab"], **added}
    tokens = sorted(ids, key=lambda token: ids[token])
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    metadata = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in added else 1 for token in tokens],
        "merges": merges,
    }
    return {f"tokenizer.ggml.{key}": entry for key, entry in metadata.items()}


def split(
    metadata: Mapping[str, Any], tensors: Mapping[str, Stored], n: int, path: Path
) -> list[Path]:
    """Write a file in n parts; the first part has the metadata."""
    paths = []
    names = list(tensors)
    step = -(-len(tensors) // n)
    for i, first in zip(range(n), itertools.count(0, step), strict=False):
        part_metadata = {"split.no": i, "split.count": n, "split.tensors.count": len(tensors)}
        part = {name: tensors[name] for name in names[first : first + step]}
        paths.append(path.with_name(f"{path.stem}-{i + 1:05}-of-{n:05}.gguf"))
        paths[-1].write_bytes(file_bytes({**(metadata if i == 0 else {}), **part_metadata}, part))
    return paths

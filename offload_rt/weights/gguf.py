"""GGUF headers as config and tensors of a transformers checkpoint."""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError, UnsupportedModelError
from offload_rt.packing import BLOCKS
from offload_rt.system.gguf_fields import Fields
from offload_rt.weights.header import FLOATS, TensorRecord, stamp_of
from offload_rt.weights.layout import align_up
from offload_rt.weights.source import Source, StoredTensor

SUFFIX = ".gguf"
_FLOATS = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}
_BLOCKS = {block.number: name for name, block in BLOCKS.items()}
_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})\.gguf")
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
# Modules of an expert by family, for tensors with the matrices of all experts.
_EXPERTS = {
    "mixtral": ("block_sparse_moe.experts", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen3_moe": ("mlp.experts", {name: f"{name}_proj" for name in ("gate", "up", "down")}),
}
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
ROPE_FREQS = "rope_freqs.weight"
# Families of transformers; Mistral's are llama, and Mixtral's are llama with experts.
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}
_SIZES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.key_length": "head_dim",
    "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
_EPS = "attention.layer_norm_rms_epsilon"
_SCALING = "rope.scaling."
_BETAS = ("beta_fast", "beta_slow")
_N_EXPERTS = "expert_count"
_EXPERT_SIZES = {
    _N_EXPERTS: "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_KNOWN = {
    *_SIZES, *_EXPERT_SIZES, _EPS, "vocab_size", "attention.value_length", "rope.dimension_count",
    "rope.freq_base", "rope.scale_linear", "tensor_data_layout",
    *(_SCALING + key for key in ("type", "factor", "original_context_length", "finetuned")),
    *(f"{_SCALING}yarn_{beta}" for beta in _BETAS),
}  # fmt: skip
_END_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class Storage:
    """Replacement for a quantization_config.

    head_dim  None unless rows of queries and keys have llama.cpp's rotation order (adjacent pairs)
    """

    head_dim: int | None


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """Read a file, possibly split: config as in config.json, tensors by transformers' names.

    Raises CheckpointError for a damaged file, UnsupportedModelError for an unsupported model.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorRecord] = {}
    for part in reversed(parts(path)):
        metadata, part_tensors = _read_file(part)  # the first part has all metadata
        tensors |= part_tensors
    config = _config(metadata, tensors, path.name)
    return config, _with_experts(tensors, config["model_type"])


def parts(path: Path) -> list[Path]:
    """Return all parts of a split file, in order."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    return [
        path.with_name(f"{match[1]}{i + 1:05}{match[3]}{match[4]}{SUFFIX}")
        for i in range(int(match[4]) or 1)
    ]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            stamp = stamp_of(os.fstat(file.fileno()))
            fields = Fields(data)
            n_tensors, metadata = fields.metadata()
            entries = [_entry(fields) for _ in range(n_tensors)]
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or not 0 < alignment <= 1 << 24 or alignment % 8:
                raise ValueError(f"general.alignment {alignment}")
            start = align_up(fields.at, alignment)
            records = [_record(entry, start, path, stamp) for entry in entries]
        tensors = {record.name: record for record in records}
        if len(tensors) < len(records):
            raise ValueError("two tensors have the same name")
    except OSError as error:
        problem = f"{path}: {error.strerror or error}"
        raise CheckpointError(problem, change="give all parts of a whole file") from error
    except (ValueError, OverflowError, struct.error) as error:
        problem = f"{path.name} is damaged, cut short or not a GGUF file: {error}"
        raise CheckpointError(problem, change="download it again") from error
    return metadata, tensors


def _entry(fields: Fields) -> tuple[str, tuple[int, ...], int, int]:
    """Read name, shape, number of the type, and offset of a tensor."""
    name = fields.text()
    n_dims = fields.number("<I")
    if not 1 <= n_dims <= 4:
        raise ValueError(f"tensor {name!r} of {n_dims} dimensions")
    shape = tuple(fields.number("<Q") for _ in range(n_dims))[::-1]
    return name, shape, fields.number("<I"), fields.number("<Q")


def _record(
    entry: tuple[str, tuple[int, ...], int, int], start: int, path: Path, stamp: tuple[int, int]
) -> TensorRecord:
    """Return the record of a tensor; the shape of blocks counts bytes."""
    name, shape, kind, offset = entry
    dtype = _FLOATS.get(kind) or _BLOCKS.get(kind)
    if dtype is None:
        need = "one of " + ", ".join([*_FLOATS.values(), *_BLOCKS.values()])
        problem = f"{path.name}: tensor {name!r} is of ggml type {kind}"
        raise UnsupportedModelError(problem, need=need)
    if dtype in BLOCKS:
        block = BLOCKS[dtype]
        n = shape[-1]
        if n % block.n:
            raise ValueError(f"tensor {name!r} has rows of {n} weights in blocks of {block.n}")
        shape = (*shape[:-1], n // block.n * block.size)
    first = start + offset
    last = first + math.prod(shape) * (1 if dtype in BLOCKS else FLOATS[dtype].itemsize)
    if offset % 8 or last > stamp[0]:
        raise ValueError(f"tensor {name!r} is at bytes {first} to {last} of {stamp[0]}")
    name = _renamed(name)
    return TensorRecord(name, dtype, shape, path, first, last, name, stamp)


def _renamed(name: str) -> str:
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match is not None and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{kind}"
    return f"{_MODULES[module]}.{kind}" if module in _MODULES else name


def _with_experts(tensors: dict[str, TensorRecord], family: str) -> dict[str, TensorRecord]:
    """Replace tensors with the matrices of all experts by a tensor per expert."""
    if family not in _EXPERTS:
        return tensors
    prefix, modules = _EXPERTS[family]
    divided: dict[str, TensorRecord] = {}
    for name, record in tensors.items():
        match = _EXPERT_TENSOR.fullmatch(name)
        if match is None:
            divided[name] = record
            continue
        for expert in range(record.shape[0]):
            key = f"model.layers.{match[1]}.{prefix}.{expert}.{modules[match[2]]}.weight"
            rows = record.rows(expert, 1)
            divided[key] = replace(rows, name=key, shape=rows.shape[1:], key=key)
    return divided


def _config(
    metadata: dict[str, Any], tensors: dict[str, TensorRecord], name: str
) -> dict[str, Any]:
    family = metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        problem = f"{name}: general.architecture {family!r} is not supported"
        raise UnsupportedModelError(problem, have=", ".join(_ARCHITECTURES))
    keys = [key for key in metadata if key.startswith(f"{family}.")]
    values = {key.removeprefix(f"{family}."): metadata[key] for key in keys}
    for key, value in values.items():
        if key not in _KNOWN and value:
            problem = f"{name}: {family}.{key} is not understood"
            raise UnsupportedModelError(problem, have=str(value))
    sizes = _sizes(values, f"{name}: {family}")
    head_dim = sizes["head_dim"]
    embedding = tensors.get("model.embed_tokens.weight")
    is_mixtral = family == "llama" and values.get(_N_EXPERTS)
    config = sizes | {
        "model_type": "mixtral" if is_mixtral else _ARCHITECTURES[family],
        "rms_norm_eps": values.get(_EPS),
        "torch_dtype": _dtype(tensors.values()),
        "vocab_size": values.get("vocab_size") if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "rope_parameters": _rope(values, tensors, head_dim, name),
        "eos_token_id": sorted({i for i in map(metadata.get, _END_IDS) if type(i) is int}),
        "quantization_config": Storage(head_dim if family == "llama" else None),
    }
    if config["model_type"] == "qwen3_moe":
        config["norm_topk_prob"] = True  # as llama.cpp computes this family
    for key, module in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.down_proj")):
        # qwen2 always has biases of attention
        if f"model.layers.0.{module}.bias" in tensors and family != "qwen2":
            config[key] = True
    return config


def _sizes(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return the sizes of a config.json; `prefix` names file and family in errors."""
    values.setdefault("attention.head_count_kv", values.get("attention.head_count"))
    keys = _SIZES | {key: name for key, name in _EXPERT_SIZES.items() if values.get(key)}
    sizes: dict[str, Any] = {key: values.get(key) for key in keys if key != "attention.key_length"}
    for key, value in sizes.items():
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise UnsupportedModelError(f"{prefix}.{key} is {value!r}", need="a whole number")
    width = sizes["embedding_length"] // sizes["attention.head_count"]
    head_dim = values.get("attention.key_length", values.get("rope.dimension_count", width))
    for key in ("rope.dimension_count", "attention.value_length"):
        if values.get(key, head_dim) != head_dim:
            need = f"{head_dim!r}, that of a head"
            raise UnsupportedModelError(f"{prefix}.{key} is {values[key]!r}", need=need)
    sizes["attention.key_length"] = head_dim
    return {config_key: sizes[key] for key, config_key in keys.items()}


def _dtype(records: Iterable[TensorRecord]) -> str:
    """Return the dtype of 16-bit matrices; bfloat16, which does not overflow, if quantised."""
    dtypes = {record.dtype for record in records}
    if dtypes <= {"F32", "F64"}:
        return "float32"
    return "float16" if "F16" in dtypes and dtypes.isdisjoint((*BLOCKS, "BF16")) else "bfloat16"


def _rope(
    values: dict[str, Any], tensors: dict[str, TensorRecord], head_dim: int, name: str
) -> dict[str, Any]:
    """Return rotary parameters: plain, scaled, or with a divisor per frequency as in Llama 3."""
    rope = {
        "rope_type": values.get(f"{_SCALING}type") or "linear",
        "rope_theta": values.get("rope.freq_base", 10000.0),
    }
    factor = values.get(f"{_SCALING}factor", values.get("rope.scale_linear")) or 1.0
    if ROPE_FREQS in tensors:
        stored = StoredTensor(ROPE_FREQS, (head_dim // 2,), DType.FLOAT32)
        divisors = Source({ROPE_FREQS: tensors[ROPE_FREQS]}).read(stored)
        if factor != 1.0 or not bool((divisors.isfinite() & (divisors > 0)).all()):
            need = "positive numbers, and no scaling"
            raise UnsupportedModelError(f"{name}: {ROPE_FREQS} is not understood", need=need)
        context = values["context_length"]
        rope |= {"rope_type": "longrope", "original_max_position_embeddings": context}
        rope |= dict.fromkeys(("factor", "attention_factor"), 1.0)
        return rope | dict.fromkeys(("short_factor", "long_factor"), divisors.tolist())
    if factor == 1.0 or rope["rope_type"] == "none":
        return {**rope, "rope_type": "default"}
    if rope["rope_type"] == "yarn":
        rope["original_max_position_embeddings"] = values.get(f"{_SCALING}original_context_length")
        keys = {beta: f"{_SCALING}yarn_{beta}" for beta in _BETAS}
        rope |= {beta: values[key] for beta, key in keys.items() if key in values}
    elif rope["rope_type"] != "linear":
        problem = f"{name}: {_SCALING}type {rope['rope_type']!r} is not understood"
        raise UnsupportedModelError(problem, have="none, linear, yarn")
    return {**rope, "factor": factor}

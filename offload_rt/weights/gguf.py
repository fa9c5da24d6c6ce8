"""GGUF files: their header, every count and length of it bounded, as the config and tensors of a
transformers checkpoint.

Layout: the magic word, counts of tensors and metadata, the metadata, the tensors' names, shapes,
types and offsets, and behind padding their bytes
(github.com/ggml-org/ggml/blob/master/docs/gguf.md).
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload_rt.dtypes import DType
from offload_rt.errors import CheckpointError, UnsupportedModelError
from offload_rt.packing import BLOCKS
from offload_rt.weights.header import FLOATS, TensorRecord, stamp_of
from offload_rt.weights.layout import align_up
from offload_rt.weights.source import Source, StoredTensor

SUFFIX = ".gguf"
_NUMBERS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_TEXT = 8
_ARRAY = 9
_FLOATS = {0: "F32", 1: "F16", 28: "F64", 30: "BF16"}
_BLOCKS = {block.number: name for name, block in BLOCKS.items()}
# A vocabulary has some 2^18 entries, a chat template some kilobytes.
_MOST_ENTRIES = 1 << 22
_LONGEST = 1 << 24
_LONGEST_KEPT = 1 << 10
_PART = re.compile(r"(.*-)(\d{5})(-of-)(\d{5})\.gguf")
_MODULES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
ROPE_FREQS = "rope_freqs.weight"
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's are llama
_SIZES = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
}  # fmt: skip
_EPS = "attention.layer_norm_rms_epsilon"
_SCALING = "rope.scaling."
_BETAS = ("beta_fast", "beta_slow")
_KNOWN = {
    *_SIZES, _EPS, "vocab_size", "attention.value_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear",
    "tensor_data_layout",
    *(_SCALING + key for key in ("type", "factor", "original_context_length", "finetuned")),
    *(f"{_SCALING}yarn_{beta}" for beta in _BETAS),
}  # fmt: skip
_END_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))


@dataclass(frozen=True)
class Storage:
    """What stands for a quantization_config.

    head_dim  where the rows of queries and keys lie in the order of llama.cpp's rotation, pairs
              together; else None
    """

    head_dim: int | None


class _Fields:
    """The fields of a mapped file, one after the other. Raises ValueError or struct.error for what
    cannot be one.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def number(self, form: str) -> Any:
        value = struct.unpack_from(form, self._data, self.at)[0]
        self.at += struct.calcsize(form)
        return value

    def count(self, most: int = _MOST_ENTRIES) -> int:
        n: int = self.number("<Q")
        if n > most:
            raise ValueError(f"a count or length of {n}")
        return n

    def text(self) -> str:
        n = self.count(_LONGEST)
        self.at += n
        return self._data[self.at - n : self.at].decode()

    def value(self) -> Any:
        """One of the metadata; None for an array that is text or long."""
        kind = self.number("<I")
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            return self.number(_form(kind))
        kind = self.number("<I")
        n = self.count()
        if kind == _TEXT:
            at = self.at
            for _ in range(n):
                at += 8 + int.from_bytes(self._data[at : at + 8], "little")
            self.at = at
            return None
        if n <= _LONGEST_KEPT:
            return [self.number(_form(kind)) for _ in range(n)]
        self.at += n * struct.calcsize(_form(kind))
        return None


def _form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"a value of type {kind}")
    return _NUMBERS[kind]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """The config of a file, which may be split, as config.json would have it, and its tensors by
    transformers' names.

    Raises CheckpointError for a file that is damaged or cut short, UnsupportedModelError for a
    model that is not understood.
    """
    metadata: dict[str, Any] = {}
    tensors: dict[str, TensorRecord] = {}
    for part in reversed(parts(path)):
        metadata, found = _read_file(part)  # the first part has all the metadata
        tensors |= found
    return _config(metadata, tensors, path.name), tensors


def parts(path: Path) -> list[Path]:
    """The files that a file is split into, the first of them first."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    return [
        path.with_name(f"{match[1]}{i + 1:05}{match[3]}{match[4]}{SUFFIX}")
        for i in range(int(match[4]) or 1)
    ]


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, TensorRecord]]:
    """Metadata and tensors of one file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            stamp = stamp_of(os.fstat(file.fileno()))
            fields = _Fields(data)
            if (magic := fields.number("4s")) != b"GGUF":
                raise ValueError(f"it begins with {magic}")
            if (version := fields.number("<I")) not in (2, 3):
                raise ValueError(f"version {version}, not 2 or 3")
            n_tensors = fields.count()
            n_values = fields.count()
            metadata = {fields.text(): fields.value() for _ in range(n_values)}
            entries = [_entry(fields) for _ in range(n_tensors)]
            alignment = metadata.get("general.alignment", 32)
            if type(alignment) is not int or not 0 < alignment <= _LONGEST or alignment % 8:
                raise ValueError(f"general.alignment {alignment}")
            start = align_up(fields.at, alignment)
            records = [_record(one, start, path, stamp) for one in entries]
        tensors = {record.name: record for record in records}
        if len(tensors) < len(records):
            raise ValueError("two tensors have the same name")
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}", change="give all parts of a whole file"
        ) from error
    except (ValueError, OverflowError, struct.error) as error:
        raise CheckpointError(
            f"{path.name} is damaged, cut short or not a GGUF file: {error}",
            change="download it again",
        ) from error
    return metadata, tensors


def _entry(fields: _Fields) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, number of the type and offset of a tensor."""
    name = fields.text()
    n_dims = fields.number("<I")
    if not 1 <= n_dims <= 4:
        raise ValueError(f"tensor {name!r} of {n_dims} dimensions")
    shape = tuple(fields.number("<Q") for _ in range(n_dims))[::-1]
    return name, shape, fields.number("<I"), fields.number("<Q")


def _record(
    entry: tuple[str, tuple[int, ...], int, int], start: int, path: Path, stamp: tuple[int, int]
) -> TensorRecord:
    """A tensor whose bytes lie in the file; of blocks the shape is that of their bytes."""
    name, shape, kind, offset = entry
    dtype = _FLOATS.get(kind) or _BLOCKS.get(kind)
    if dtype is None:
        known = ", ".join([*_FLOATS.values(), *_BLOCKS.values()])
        raise UnsupportedModelError(
            f"{path.name}: tensor {name!r} is of ggml type {kind}", need=f"one of {known}"
        )
    if dtype in BLOCKS:
        block = BLOCKS[dtype]
        if shape[-1] % block.n:
            raise ValueError(
                f"tensor {name!r} has rows of {shape[-1]} weights in blocks of {block.n}"
            )
        shape = (*shape[:-1], shape[-1] // block.n * block.size)
    first = start + offset
    last = first + math.prod(shape) * (1 if dtype in BLOCKS else FLOATS[dtype].itemsize)
    if offset % 8 or last > stamp[0]:
        raise ValueError(f"tensor {name!r} is at bytes {first} to {last} of {stamp[0]}")
    name = _renamed(name)
    return TensorRecord(name, dtype, shape, path, first, last, name, stamp)


def _renamed(name: str) -> str:
    """The name that transformers has for a tensor; its own where there is none."""
    module, _, kind = name.rpartition(".")
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if match is not None and match[2] in _IN_LAYER:
        return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{kind}"
    return f"{_MODULES[module]}.{kind}" if module in _MODULES else name


def _config(
    metadata: dict[str, Any], tensors: dict[str, TensorRecord], name: str
) -> dict[str, Any]:
    """What a config.json of the model would say."""
    family = metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        have = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(
            f"{name}: general.architecture {family!r} is not supported", have=have
        )
    own = {
        key.removeprefix(f"{family}."): value
        for key, value in metadata.items()
        if key.startswith(f"{family}.")
    }
    for key, value in own.items():
        if key not in _KNOWN and value:
            raise UnsupportedModelError(
                f"{name}: {family}.{key} is not understood", have=str(value)
            )
    own.setdefault("attention.head_count_kv", own.get("attention.head_count"))
    sizes: dict[str, Any] = {
        theirs: own.get(theirs) for theirs in _SIZES if theirs != "attention.key_length"
    }
    for key, value in sizes.items():
        if type(value) is not int or not 1 <= value < 1 << 24:
            raise UnsupportedModelError(
                f"{name}: {family}.{key} is {value!r}", need="a whole number"
            )
    plain = own.get(
        "rope.dimension_count", sizes["embedding_length"] // sizes["attention.head_count"]
    )
    head_dim = sizes["attention.key_length"] = own.get("attention.key_length", plain)
    for key in ("rope.dimension_count", "attention.value_length"):
        if own.get(key, head_dim) != head_dim:
            raise UnsupportedModelError(
                f"{name}: {family}.{key} is {own[key]!r}", need=f"{head_dim!r}, that of a head"
            )
    embedding = tensors.get("model.embed_tokens.weight")
    config = {ours: sizes[theirs] for theirs, ours in _SIZES.items()} | {
        "model_type": family, "rms_norm_eps": own.get(_EPS),
        "torch_dtype": _dtype(tensors.values()),
        "vocab_size": own.get("vocab_size") if embedding is None else embedding.shape[0],
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "rope_parameters": _rope(own, tensors, head_dim, name),
        "eos_token_id": sorted(
            {metadata[key] for key in _END_IDS if type(metadata.get(key)) is int}
        ),
        "quantization_config": Storage(head_dim if family == "llama" else None),
    }  # fmt: skip
    for key, module in (("attention_bias", "self_attn.q_proj"), ("mlp_bias", "mlp.down_proj")):
        # which always has the former
        if f"model.layers.0.{module}.bias" in tensors and family != "qwen2":
            config[key] = True
    return config


def _dtype(records: Iterable[TensorRecord]) -> str:
    """Matrices in 16 bits are computed with in their dtype, quantised ones in bfloat16, which does
    not overflow.
    """
    found = {record.dtype for record in records}
    if found <= {"F32", "F64"}:
        return "float32"
    return "float16" if "F16" in found and found.isdisjoint((*BLOCKS, "BF16")) else "bfloat16"


def _rope(
    own: dict[str, Any], tensors: dict[str, TensorRecord], head_dim: int, name: str
) -> dict[str, Any]:
    """Rotary embeddings: plain, scaled, or with a divisor for each frequency, as of Llama 3."""
    rope = {
        "rope_type": own.get(f"{_SCALING}type") or "linear",
        "rope_theta": own.get("rope.freq_base", 10000.0),
    }
    factor = own.get(f"{_SCALING}factor", own.get("rope.scale_linear")) or 1.0
    if ROPE_FREQS in tensors:
        record = tensors[ROPE_FREQS]
        divisors = Source({ROPE_FREQS: record}).read(
            StoredTensor(ROPE_FREQS, (head_dim // 2,), DType.FLOAT32)
        )
        if factor != 1.0 or not bool((divisors.isfinite() & (divisors > 0)).all()):
            raise UnsupportedModelError(
                f"{name}: {ROPE_FREQS} is not understood", need="positive numbers, and no scaling"
            )
        # Those of a long context and those of a short one are the same.
        both = dict.fromkeys(("short_factor", "long_factor"), divisors.tolist())
        original = {"original_max_position_embeddings": own["context_length"]}
        return {
            **rope,
            "rope_type": "longrope",
            "factor": 1.0,
            "attention_factor": 1.0,
            **both,
            **original,
        }
    if factor == 1.0 or rope["rope_type"] == "none":
        return {**rope, "rope_type": "default"}
    if rope["rope_type"] == "yarn":
        betas = {
            beta: own[f"{_SCALING}yarn_{beta}"]
            for beta in _BETAS
            if f"{_SCALING}yarn_{beta}" in own
        }
        rope |= {
            "original_max_position_embeddings": own.get(f"{_SCALING}original_context_length"),
            **betas,
        }
    elif rope["rope_type"] != "linear":
        have = "none, linear, yarn"
        raise UnsupportedModelError(
            f"{name}: {_SCALING}type {rope['rope_type']!r} is not understood", have=have
        )
    return {**rope, "factor": factor}

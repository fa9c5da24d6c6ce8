"""Builders of tiny checkpoints, byte by byte, so that a test can spoil any one of them."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from offload_rt.dtypes import DType
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.matrix import Matrix

WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int8: "I8",
}  # fmt: skip
# What stands for a byte in a byte-level tokenizer: the space has a letter of its own.
ASCII = "".join(map(chr, range(33, 127))) + "\u0120"
BYTES = "".join(sorted(pre_tokenizers.ByteLevel.alphabet()))
Entries = dict[str, dict[str, Any]]


def llama_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny Llama; None removes a key."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "float32", "rope_theta": 10000.0, "eos_token_id": 2,
    }  # fmt: skip
    return {key: value for key, value in (config | changes).items() if value is not None}


def llama_tensors(
    config: Mapping[str, Any], dtype: torch.dtype = torch.float32, seed: int = 0
) -> dict[str, Tensor]:
    """Random weights under transformers' names; their scale keeps activations near one."""
    d, m, head = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[f"num_{name}_heads"] * head for name in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q),
        "mlp.gate_proj": (m, d), "mlp.up_proj": (m, d), "mlp.down_proj": (d, m),
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return {
        name: (draw(shape) / shape[-1] ** 0.5 + (len(shape) == 1)).to(dtype)
        for name, shape in shapes.items()
    }


def raw_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def entries_of(tensors: Mapping[str, Tensor]) -> tuple[Entries, bytes]:
    """The header entries of tensors laid one behind the other, and their bytes."""
    entries = {}
    data = b""
    for name, tensor in tensors.items():
        block = raw_bytes(tensor)
        entries[name] = {
            "dtype": WORDS[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(block)],
        }
        data += block
    return entries, data


def file_bytes(header: Any, data: bytes, odd: int = 0) -> bytes:
    """A safetensors file.

    header  JSON content, or the text itself
    odd     the data starts at a file offset of so much modulo 8
    """
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    text += b" " * ((odd - len(text)) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_file(path: Path, tensors: Mapping[str, Tensor], odd: int = 0) -> None:
    entries, data = entries_of(tensors)
    path.write_bytes(file_bytes({"__metadata__": {"format": "pt"}, **entries}, data, odd))


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], odd: int = 0
) -> Path:
    """A checkpoint of one file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_file(directory / "model.safetensors", tensors, odd)
    return directory


def write_sharded(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    parts: Sequence[Iterable[str]],
) -> Path:
    """Write a checkpoint of several shards.

    parts  names of the tensors of each shard, in order
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    where = {}
    for n, names in enumerate(parts, 1):
        shard = f"model-{n:05}-of-{len(parts):05}.safetensors"
        picked = {name: tensors[name] for name in names}
        write_file(directory / shard, picked)
        where |= dict.fromkeys(picked, shard)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def save_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def trained(vocab_size: int, alphabet: Sequence[str], texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=[*alphabet], show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def dealt(names: Iterable[str], n_parts: int) -> list[list[str]]:
    """Deal names in turn, so that every layer is in every part."""
    names = list(names)
    return [names[i::n_parts] for i in range(n_parts)]


def add_tokenizer(directory: Path, alphabet: str = ASCII) -> int:
    """Write a small byte-level BPE tokenizer of these bytes; returns its number of tokens."""
    text = "the quick brown fox jumps over the lazy dog; the end of the story"
    tokenizer = trained(len(alphabet) + 40, alphabet, [text] * 4)
    save_tokenizer(directory, tokenizer)
    return tokenizer.get_vocab_size()


def speaking_checkpoint(directory: Path, alphabet: str = ASCII, **changes: Any) -> Path:
    """Write a checkpoint without end token, whose every token is text."""
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {
        "vocab_size": add_tokenizer(directory, alphabet), "hidden_size": 64,
        "intermediate_size": 128, "head_dim": 16,
        "num_hidden_layers": 6, "max_position_embeddings": 8192, "eos_token_id": None,
    }  # fmt: skip
    config = llama_config(**wanted | changes)
    return write_checkpoint(directory, config, llama_tensors(config))


def pack(
    tensors: Mapping[str, Tensor], matrices: Mapping[str, Matrix] | None = None
) -> PackedLayer:
    """Copy tensors, some of them of quantised matrices, into a new block."""
    entries = ((name, tuple(x.shape), DType.from_torch(x.dtype)) for name, x in tensors.items())
    layout = packed_layout(entries, matrices)
    image = PackedLayer(host_block(layout.nbytes), layout)
    for name, view in layout.views(image.block).items():
        view.copy_(tensors[name])
    return image


def check_bytes(layers: Any, settings: ReadSettings | None = None, backwards: bool = False) -> None:
    """Assert that the disk tier reads the bytes of the files, in any order."""
    tier = DiskTier(layers, settings)
    for i, records in enumerate(layers):
        layout = tier.layout(i)
        block = host_block(layout.nbytes).fill_(0xA5)
        for read in tier.reads(i, block)[:: -1 if backwards else 1]:
            read()
        views = layout.views(block)
        for record in records:
            content = record.path.read_bytes()[record.start : record.stop]
            assert raw_bytes(views[record.key]) == content, (i, record.key)
    tier.close()

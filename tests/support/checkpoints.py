"""Builders of tiny checkpoints, byte by byte, so that a test can spoil any one of them."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from offload_rt.dtypes import DType
from offload_rt.offload.disk import DiskTier
from offload_rt.weights.layout import PackedLayer, host_block, packed_layout
from offload_rt.weights.matrix import Matrix

WORDS = {dtype: word for word, dtype in safetensors.torch._TYPES.items()}
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
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    return {
        name: (draw(x.shape) / x.shape[-1] ** 0.5 + (x.ndim == 1)).to(dtype)
        for name, x in model.named_parameters()
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
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], n_shards: int = 1
) -> Path:
    """Write a checkpoint; tensors are dealt to shards in turn, so that each has every layer."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if n_shards == 1:
        write_file(directory / "model.safetensors", tensors)
        return directory
    where = {}
    for n in range(n_shards):
        shard = f"model-{n + 1:05}-of-{n_shards:05}.safetensors"
        picked = dict([*tensors.items()][n::n_shards])
        write_file(directory / shard, picked)
        where |= dict.fromkeys(picked, shard)
    index = {"metadata": {}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def add_tokenizer(directory: Path, tokenizer: Tokenizer) -> None:
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


def speaking_checkpoint(
    directory: Path, alphabet: str = ASCII, n_shards: int = 1, **changes: Any
) -> Path:
    """Write a checkpoint without end token, whose every token is text."""
    text = "the quick brown fox jumps over the lazy dog; the end of the story"
    tokenizer = trained(len(alphabet) + 40, alphabet, [text] * 4)
    config = llama_config(**{
        "vocab_size": tokenizer.get_vocab_size(), "hidden_size": 64, "intermediate_size": 128,
        "head_dim": 16, "num_hidden_layers": 6, "max_position_embeddings": 8192,
        "eos_token_id": None, **changes,
    })  # fmt: skip
    write_checkpoint(directory, config, llama_tensors(config), n_shards=n_shards)
    add_tokenizer(directory, tokenizer)
    return directory


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


def check_bytes(layers: Any, backwards: bool = False) -> None:
    """Assert that the disk tier reads the bytes of the files, in any order."""
    tier = DiskTier(layers)
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

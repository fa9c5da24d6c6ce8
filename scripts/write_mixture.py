"""Write a GGUF file of a mixture with random weights and the tokenizer of the demo target.

    python scripts/write_mixture.py build/mixture.gguf --kind qwen3_moe --type Q4_0 --layers 3

The layers have the shape of Qwen3-30B-A3B (128 experts, 8 per token), or half the width of Mixtral
8x7B (8 experts, 2 per token). The experts of a layer have the same rows in different orders.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import write_gguf
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig
from write_gguf import Stored

_TOKENIZER = Path(__file__).parents[1] / "models/demo-target/tokenizer.json"
_SHAPE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(kind: str, n_layers: int, vocab_size: int) -> PreTrainedConfig:
    """Return the config of a mixture."""
    shape = _SHAPE | {"num_hidden_layers": n_layers, "vocab_size": vocab_size}
    if kind == "mixtral":
        return MixtralConfig(**shape, intermediate_size=7168)
    fine: dict[str, Any] = {"moe_intermediate_size": 768, "num_experts": 128}
    return Qwen3MoeConfig(**shape, **fine, num_experts_per_tok=8, norm_topk_prob=True)


def random_tensors(config: PreTrainedConfig, type: str) -> Iterator[tuple[str, Stored]]:
    """Yield the tensors of a file."""
    raw = config.to_dict()
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for whole, tensor in shapes.items():
        for name, part in write_gguf.divided(whole, tensor).items():
            n_experts = part.shape[0] if part.dim() == 3 else 1
            shape = part.shape[-2:]
            weight = torch.ones(shape)
            if part.dim() > 1:
                weight = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            file_name, stored, _ = write_gguf.convert(raw, name, weight, type)
            rows = torch.frombuffer(bytearray(stored.data), dtype=torch.uint8).view(len(weight), -1)
            orders = [torch.randperm(len(rows), generator=generator) for _ in range(n_experts - 1)]
            data = b"".join([stored.data, *(rows[order].numpy().tobytes() for order in orders)])
            yield file_name, Stored(stored.type, tuple(part.shape), data)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=("qwen3_moe", "mixtral"), default="qwen3_moe")
    parser.add_argument("--type", choices=write_gguf.TYPES, default="Q4_0")
    parser.add_argument("--layers", type=int, default=3)
    flags = parser.parse_args()
    metadata = write_gguf.tokenizer(_TOKENIZER)
    vocab_size = len(metadata["tokenizer.ggml.tokens"])
    config = config_of(flags.kind, flags.layers, vocab_size)
    metadata |= write_gguf.metadata_of(json.loads(config.to_json_string(use_diff=False)))
    with flags.out.open("wb") as file:
        tensors = dict(random_tensors(config, flags.type))
        file.writelines(write_gguf.file_parts(metadata, tensors))


if __name__ == "__main__":
    main()

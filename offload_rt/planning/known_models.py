"""The shapes of well-known models, as their published config.json says, for planning where no hub is at hand."""

from typing import Any


def _llama(d: int, m: int, layers: int, heads: int, kv: int, **more: Any) -> dict[str, Any]:
    """A Llama's config from hidden and intermediate size, layers, heads, and heads of keys and values."""
    sizes = {
        "hidden_size": d,
        "intermediate_size": m,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    base = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    return {**base, "torch_dtype": "float16", **sizes, **more}


_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 5e5, "torch_dtype": "bfloat16"}

# Sizes as remembered from the published files; those of Llama 2 and 3 also stand in their papers.
KNOWN: dict[str, dict[str, Any]] = {
    "llama2-7b": _llama(4096, 11008, 32, 32, 32),
    "llama2-13b": _llama(5120, 13824, 40, 40, 40),
    "llama2-70b": _llama(8192, 28672, 80, 64, 8),
    "llama3-8b": _llama(4096, 14336, 32, 32, 8, **_LLAMA_3),
    "llama3-70b": _llama(8192, 28672, 80, 64, 8, **_LLAMA_3),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4, max_position_embeddings=2048),
    "sheared-llama-1.3b": _llama(2048, 5504, 24, 16, 16),
    "llama-68m": _llama(768, 3072, 2, 12, 12, max_position_embeddings=2048, rms_norm_eps=1e-6, torch_dtype="float32"),
    "vicuna-33b": _llama(6656, 17920, 60, 52, 52, max_position_embeddings=2048, rms_norm_eps=1e-6),
}

"""Qwen2 and Qwen2.5: biases on queries, keys and values."""

from transformers import Qwen2Config

from offload_rt.models._spec import ModelSpec, common_spec, layer_windows

ARCHITECTURE = "Qwen2ForCausalLM"
CONFIG = Qwen2Config
REQUIRED = ("num_key_value_heads",)
KEYS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "use_mrope"}


def spec(config: Qwen2Config) -> ModelSpec:
    """The spec of a parsed config; head_dim is not a key of this family and follows from the sizes."""
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return common_spec(config, windows=layer_windows(config), qkv_bias=True)

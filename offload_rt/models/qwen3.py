"""Qwen3 (dense): RMS norms on each query and key head."""

from transformers import Qwen3Config

from offload_rt.models._spec import ModelSpec, common_spec, layer_windows

ARCHITECTURE = "Qwen3ForCausalLM"
CONFIG = Qwen3Config
REQUIRED = ("num_key_value_heads", "head_dim")
KEYS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias"}


def spec(config: Qwen3Config) -> ModelSpec:
    """The spec of a parsed config."""
    bias = config.attention_bias
    return common_spec(config, windows=layer_windows(config), qkv_bias=bias, o_bias=bias, qk_norm=True)

"""Llama 2, 3, 3.1-3.3, CodeLlama, Vicuna, TinyLlama, Sheared-LLaMA."""

from transformers import LlamaConfig

from offload_rt.models._spec import ModelSpec, common_spec

ARCHITECTURE = "LlamaForCausalLM"
CONFIG = LlamaConfig
REQUIRED = ()
KEYS = {"attention_bias", "mlp_bias"}


def spec(config: LlamaConfig) -> ModelSpec:
    """The spec of a parsed config; both biases are off in every published Llama and on where the config says so."""
    return common_spec(config, qkv_bias=config.attention_bias, o_bias=config.attention_bias, mlp_bias=config.mlp_bias)

"""Mistral 7B and its kin, with the sliding window of the first version."""

from transformers import MistralConfig

from offload_rt.models._spec import ModelSpec, common_spec

ARCHITECTURE = "MistralForCausalLM"
CONFIG = MistralConfig
REQUIRED = ("num_key_value_heads",)
KEYS = {"sliding_window"}


def spec(config: MistralConfig) -> ModelSpec:
    """The spec of a parsed config; the window holds for every layer."""
    return common_spec(config, windows=(config.sliding_window,) * config.num_hidden_layers)

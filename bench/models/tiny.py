"""Tiny random checkpoints of any model type of transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_rt import LLM
from offload_rt.config import EngineConfig

SPREAD = 0.2

# Sizes of a tiny model, by all names in configs.
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "d_model": 64, "n_embd": 64, "embed_dim": 64,
    "embedding_size": 64,
    "intermediate_size": 96, "ffn_dim": 96, "decoder_ffn_dim": 96, "d_ff": 96, "n_inner": 96,
    "dff": 96, "dim_ff": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 4,
    "encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "dim_head": 16,
    "d_kv": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 9999, "pad_token_id": 0,
    "sliding_window": 8, "query_pre_attn_scalar": 16, "rotary_dim": 8, "is_decoder": True,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "ffn_num_experts": 4,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2,
    "top_k_experts": 2, "moe_top_k": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "n_group": 1,
    "ffn_hidden_size": 96, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_num_shared_experts": 1, "shared_intermediate_size": 32, "dense_intermediate_size": 96,
    "zero_expert_num": 2,
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, "qk_head_dim": 16,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 160, "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "intermediate_size_mlp": 96,
    "attention_chunk_size": 512,
    "activation_dropout": 0.0, "attention_dropout": 0.0, "dropout": 0.0, "hidden_dropout": 0.0,
    "layerdrop": 0.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "swa_head_dim": 16, "swa_v_head_dim": 16, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 512, "vocab_size_per_layer": 160,
    "num_codebooks": 2,
}  # fmt: skip
# Sizes of single types; an ellipsis keeps the type's default.
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_NOT_SHARED = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_CONVOLUTIONS = {"layer_types": ["full_attention", "conv"] * 2}
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
OF_TYPE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
        "longcat_flash"), _LATENT),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _NOT_SHARED),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "glm4v_text"), _SECTIONS),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "lfm2": _CONVOLUTIONS, "lfm2_moe": _CONVOLUTIONS,
    "youtu": {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "qk_head_dim": 16, **_LATENT},
    "zaya": {"num_experts_per_tok": 1}, "zamba2": {"layer_types": ["mamba", "hybrid"] * 2},
    "moshi": {"sliding_window": 512}, "mamba2": {"head_dim": ...},
    "phi4_multimodal": {"sliding_window": None}, "cohere_compass_text": _ROPES,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 32},
}  # fmt: skip


_OF_WHOLE = {"tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}


def config_of(kind: str) -> PreTrainedConfig:
    """Return a tiny config of a type."""
    more = OF_TYPE.get(kind, {})
    return _small(CONFIG_MAPPING[kind](), SIZES | more, tuple(more))


def _small(
    config: PreTrainedConfig, sizes: dict[str, Any], forced: tuple[str, ...]
) -> PreTrainedConfig:
    made = type(config)
    values = {**config.__dict__, **made.attribute_map}
    parts = {}
    for name in made.sub_configs:
        if isinstance(values.get(name), PreTrainedConfig):
            more = OF_TYPE.get(values[name].model_type or name, {})
            parts[name] = _small(values[name], {**sizes, **more}, tuple(more)).to_dict()
    known = {name for name in sizes if name in values or name in forced}
    if not parts.keys().isdisjoint({"text_config", "decoder"}):
        known &= _OF_WHOLE
    return made(**{name: sizes[name] for name in known if sizes[name] is not ...}, **parts)


def random_model(
    config: PreTrainedConfig, seed: int = 0, has_tower: bool = False, spread: float = SPREAD
) -> PreTrainedModel:
    """Return a model of any type with weights that all affect the logits.

    has_tower  the model for images, of types that also have a model for text alone
    spread     standard deviation of the weights
    """
    is_causal = config.model_type in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kind = "CausalLM" if is_causal and not has_tower else "ImageTextToText"
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        middle = float(weight.dim() == 1 and bool(weight.mean() == 1))
        weight.data = middle + spread * torch.randn(weight.shape, generator=generator)
    return model


def open_streamed(folder: Path, **settings: Any) -> LLM:
    """Open an LLM with all layers on the disk."""
    settings = {"device": "cpu", "max_model_len": 128, **settings}
    settings |= {} if settings.get("drafter") == "none" else {"tree_size": 16}
    with LLM.open(EngineConfig(str(folder), **settings)) as unloaded:
        plan = unloaded.plan
    return LLM(str(folder), device_memory=plan.reserved.total + 2 * plan.slot_nbytes, **settings)

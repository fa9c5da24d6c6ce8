"""Tree logits of large mixtures in their published formats equal the dequantised models."""

import re
from typing import Any

import pytest
import quantize
import torch
from quantize import Choice
from safetensors.torch import load_file, save_file
from support.experts import open_touched
from support.heads import edit_config
from support.tiny import check_tree, runner_of

from bench.models.tiny import config_of, random_model

pytestmark = pytest.mark.numeric
_PROJECTIONS = r".*_proj\.weight|.*kv_a_proj_with_mqa\.weight|.*in_proj_qkvz\.weight"
# Stored modules of each fused parameter of experts.
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}
_EXPERTS = r".*\.experts\.\d+\.\w+_proj\.weight"


_FP8 = Choice("fp8", group_size=32)
_REMOTE = {"auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}}
_KIMI = {"model_type": "kimi_k2"} | _REMOTE
_INDEXED = _PROJECTIONS + r"|.*indexer\.w.*\.weight"
_ROWS = Choice("float-quantized", group_size=-1)
_INT4 = Choice("pack-quantized", symmetric=True)
# Model type, format or None for plain weights, names of quantised tensors, changes of config.json.
PUBLISHED: dict[str, tuple[str, Choice | None, str, dict[str, Any]]] = {
    "DeepSeek-V3": ("deepseek_v3", _FP8, _PROJECTIONS, _REMOTE),
    "DeepSeek-V3.2": ("deepseek_v32", _FP8, _INDEXED, {}),
    "Kimi-K2": ("deepseek_v3", _FP8, _PROJECTIONS, _KIMI),
    "Kimi-K2-Thinking": ("deepseek_v3", _INT4, _EXPERTS, _KIMI),
    "GLM-4.5-FP8": ("glm4_moe", _ROWS, _PROJECTIONS, {}),
    "GLM-5-FP8": ("glm_moe_dsa", _FP8, _INDEXED, {}),
    "Qwen3-235B-FP8": ("qwen3_moe", _FP8, _PROJECTIONS, {}),
    "Qwen3-Next-FP8": ("qwen3_next", _FP8, _PROJECTIONS, {}),
    "Llama-4": ("llama4_text", None, _PROJECTIONS, {}),
    "Llama-4-FP8": ("llama4_text", _ROWS, _EXPERTS, {}),
}


def model_of(kind):
    """A random model with eight experts, each of several pages in its file."""
    config = config_of(kind)
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        if hasattr(config, name):
            setattr(config, name, 8)
    config.moe_intermediate_size = 256
    return random_model(config)


def divided(tensors):
    """Store each expert of Llama 4 as three modules, as compressed-tensors does."""
    stored = {}
    for name, tensor in tensors.items():
        base, _, kind = name.rpartition(".experts.")
        parts = _PARTS.get(kind, ())
        if not parts:
            stored[name] = tensor
        for expert, matrix in enumerate(tensor if parts else ()):
            for part, rows in zip(parts, matrix.T.chunk(len(parts)), strict=True):
                stored[f"{base}.experts.{expert}.{part}_proj.weight"] = rows.contiguous()
    return stored


def joined(tensors, fused):
    """Return the inverse of `divided`; `fused` has the names of the result."""

    def experts(base, part, n):
        names = [f"{base}.experts.{i}.{part}_proj.weight" for i in range(n)]
        return torch.stack([tensors[name].T for name in names])

    whole = {}
    for name, tensor in fused.items():
        base, _, kind = name.rpartition(".experts.")
        each = [experts(base, part, len(tensor)) for part in _PARTS.get(kind, ())]
        whole[name] = torch.cat(each, -1) if each else tensors[name]
    return whole


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_equal_transformers_with_experts_on_demand(name, tmp_path, monkeypatch):
    kind, choice, quantised, changes = PUBLISHED[name]
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    if choice is not None:
        monkeypatch.setattr(quantize, "_MATRIX", re.compile(quantised))
        tensors = load_file(tmp_path / "model.safetensors")
        stored, exact = quantize.quantized(divided(tensors), choice)
        assert len(stored) > len(exact)
        save_file(joined(exact, tensors), tmp_path / "model.safetensors", {"format": "pt"})
        model = type(model).from_pretrained(tmp_path)
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        edit_config(tmp_path, quantization_config=quantize.config_of(choice), **changes)
    with open_touched(tmp_path, 3) as llm:
        check_tree(runner_of(llm), model, 3)

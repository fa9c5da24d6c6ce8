"""The folder is the registry: each file is an entry and fits the contract of its folder."""

import pytest
import torch
from support.tiny import generate, open_llm, prompt_of
from transformers import AutoConfig

import offload_rt.speculate.draft
from offload_rt import SamplingParams
from offload_rt.errors import SettingsError
from offload_rt.models.families import _COMMON as COMMON
from offload_rt.models.families import FAMILIES, parse_architecture
from offload_rt.models.rope import Rope
from offload_rt.speculate.draft_model import DraftModel, SelfDraftModel
from offload_rt.system import registry


def test_unknown_entry_is_refused_with_the_known_entries():
    for name in ("_dense", "__init__", "nothing", "", "none.py", "../draft/none", "draft.none"):
        with pytest.raises(SettingsError, match="adaptive_tree, ") as caught:
            registry.find("speculate.draft", name)
        assert repr(name) in str(caught.value)


def test_drafter_in_a_single_new_file_gets_the_resources_it_declares(pair, tmp_path, monkeypatch):
    (tmp_path / "windowed_triforce.py").write_text(
        "from offload_rt.kv.sparse import WindowCache\n"
        "from offload_rt.speculate.draft.triforce import TriForce\n"
        "from offload_rt.speculate.protocols import DrafterType, DraftResources\n"
        "DRAFTER = DrafterType(\n"
        "    TriForce, gives_draft_probs=True, best_rule='coupled', default_sizes=(8,),\n"
        "    resources=DraftResources(needs_model=True, view=WindowCache, view_rows=48),\n"
        ")\n"
    )
    folder = offload_rt.speculate.draft
    monkeypatch.setattr(folder, "__path__", [*folder.__path__, str(tmp_path)])
    settings = pair.settings("windowed_triforce") | {"tree_size": 8}
    with open_llm(pair.target, **settings) as llm:
        drafter = llm.engine.drafter
        output = llm.generate(prompt_of(0), SamplingParams(max_new_tokens=12))[0]
    assert output.token_ids == generate(pair.model, prompt_of(0), 12)
    assert output.stats.nodes_per_tree > 1
    models = [drafter._model, drafter._small]
    assert [type(model) for model in models] == [SelfDraftModel, DraftModel]


# models/

SIZES = {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OPTIONS = [
    {}, {"head_dim": 6}, {"rope_theta": 5e5}, {"rope_scaling": {"type": "linear", "factor": 2.0}},
    {"rope_scaling": None},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 2e4}},
    {"rope_scaling": ROPE},
    {"rope_theta": 7.0, "rope_scaling": {**ROPE, "original_max_position_embeddings": 32}},
    {"tie_word_embeddings": True},
    {"sliding_window": 5}, {"sliding_window": None}, {"use_sliding_window": True},
    {"use_sliding_window": True, "max_window_layers": 1},
    {"use_sliding_window": True, "max_window_layers": 0},
    {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 0},
    {"torch_dtype": "bfloat16"},
    {"use_sliding_window": True, "sliding_window": 7,
        "layer_types": ["full_attention", "sliding_attention"] * 2},
    {"dtype": "float16"}, {"dtype": "float32", "torch_dtype": "float16"}, {"attention_bias": True},
    {"mlp_bias": True},
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), [
    (name, options) for name in ("llama", "mistral", "qwen2", "qwen3") for options in OPTIONS
    if {*options} <= FAMILIES[name].keys | COMMON
], ids=str)  # fmt: skip
def test_config_is_read_like_transformers(name, options):
    """Including fields that transformers' config class fills in."""
    sizes = SIZES | {"num_hidden_layers": 4, "hidden_size": 32}
    if name == "llama":
        del sizes["num_key_value_heads"]
    if "head_dim" not in FAMILIES[name].required:
        del sizes["head_dim"]
    raw = {"model_type": name, **sizes, **options}
    spec = parse_architecture(raw)
    config = AutoConfig.for_model(**raw)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    expected = (head_dim, config.num_key_value_heads, config.tie_word_embeddings, dtype)
    assert (spec.head_dim, spec.n_kv_heads, spec.tied, spec.dtype_name) == expected
    kinds = getattr(config, "layer_types", ["sliding_attention"] * 4)
    window = getattr(config, "sliding_window", None)
    assert spec.windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    assert {**config.base_model_tp_plan}.items() <= {**spec.tp_plan}.items()
    config.head_dim = head_dim
    positions = torch.arange(90)
    both = (
        rope.cos_sin(positions, positions + 1, torch.float32) for rope in (spec.rope, Rope(config))
    )
    assert all(map(torch.equal, *both))

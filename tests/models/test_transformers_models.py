"""General models through transformers' modules with streamed layers: tree logits and texts."""

import json
from pathlib import Path

import pytest
import torch
from quantize import Choice, config_of, quantized
from safetensors.torch import load_file, save_file
from support.fake_gpu import fake_gpu
from support.quantized import rewrite
from support.tiny import (
    ATOL,
    Steady,
    check_tree,
    generate,
    logits_of,
    open_llm,
    open_streamed,
    prompt_of,
    prompt_steps,
    runner_of,
)
from transformers import GptOssForCausalLM, Mxfp4Config, conversion_mapping
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from bench.models.tiny import config_of as tiny_config
from bench.models.tiny import random_model
from offload_rt import LLM, SamplingParams
from offload_rt.engine import builder
from offload_rt.errors import UnsupportedModelError
from offload_rt.executor.step import Step
from offload_rt.models import traced_experts
from offload_rt.models.custom_attention import _with_positions
from offload_rt.models.families import FAMILIES, parse_architecture
from offload_rt.models.transformers import TransformersModel
from offload_rt.ops.few_rows import multiply_stack
from offload_rt.tree.topology import Topology

pytestmark = pytest.mark.numeric
# Types with attention code of their own: linear biases, learned or computed scales, local windows,
# transposed keys, an indexer, and an output matrix called decoder.
CUSTOM_ATTENTION = [
    "bloom", "mpt", "falcon", "gptj", "gpt_neo", "openai-gpt", "xglm", "glm_moe_dsa",
    "modernbert-decoder",
]  # fmt: skip
# What is new in each: softcaps and windows; the text part of a multimodal one; heads that differ by
# layer; states of several streams, keys of another layer, inputs of each layer; experts one by one;
# experts in one tensor, with biases, and sinks; latent keys and wide values; fused projections;
# learned positions, tied head; a window that only its mask has; two attentions in a layer; gated
# delta nets beside attention, in a mixture, without one, with other projections, and with
# convolutions that are stored one by one.
KINDS = [
    "gemma2", "gemma3", "gemma4_text", "gemma3n_text", "mixtral", "qwen2_moe", "qwen3_moe",
    "gpt_oss", "deepseek_v3", "phi3", "gpt2", "phimoe",
    "diffllama", "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid",
    *CUSTOM_ATTENTION,
]  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "falcon alibi"])
def test_streamed_tree_logits_equal_transformers(model_of, kind):
    model, folder = model_of(kind)
    with open_streamed(folder, drafter="none") as llm:
        assert isinstance(runner_of(llm).spec, TransformersModel)
        check_tree(runner_of(llm), model)


@pytest.mark.parametrize(("kind", "drafts_itself"), [("gpt2", False), ("opt", True)])
def test_learned_positions_are_used_to_the_last(
    tmp_path, empty_cache, monkeypatch, kind, drafts_itself
):
    """Trees and measurements stay within 64 positions, including those of a draft model."""
    # Passes are timed, but trees do not depend on the times: a busy machine would draft nothing.
    monkeypatch.setattr(builder, "CostEstimator", lambda *_: Steady())
    config = tiny_config(kind)
    config.max_position_embeddings = 64
    model = random_model(config)
    model.save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    prompt = prompt_of(0, 15, 150)
    draft = {"draft_model": folder} if drafts_itself else {}
    with LLM(folder, device="cpu", **draft) as llm:
        result = llm.generate(prompt, SamplingParams(max_new_tokens=100)).pop()
    assert result.token_ids == generate(model, prompt, 64 - len(prompt))
    assert result.stats.tokens_per_pass > 1


def test_sequences_of_a_pass_do_not_see_each_other(model_of):
    """Also if extra inputs of a layer and states of other layers belong to rows."""
    model, folder = model_of("gemma3n_text")
    prompts = [prompt_of(seed, n) for seed, n in enumerate((5, 23, 1, 16))]
    with open_llm(folder) as llm:
        runner = runner_of(llm)
        runner._chunk_rows = 16
        steps = prompt_steps(runner, prompts, 32)
        for rows, prompt in zip(runner.forward(steps), prompts, strict=True):
            expected = logits_of(model, prompt)
            torch.testing.assert_close(
                rows, expected, atol=ATOL * float(expected.abs().max()), rtol=0
            )


def test_rows_of_a_tensor_can_be_several_matrices(zoo, tmp_path, monkeypatch):
    """A checkpoint with fused queries, keys and values, as in transformers' name mapping."""
    monkeypatch.delitem(FAMILIES, "llama")
    parts = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # makes the table
    joined = WeightConverter("self_attn.qkv.weight", parts, [Chunk(dim=0)])
    table = conversion_mapping._checkpoint_conversion_mapping_cache
    monkeypatch.setitem(table, "LlamaForCausalLM", [joined])
    model = zoo.model("llama-biases", 5)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for i in range(model.config.num_hidden_layers):
        start = f"model.layers.{i}."
        whole = torch.cat([tensors.pop(start + part) for part in parts])
        tensors[f"{start}self_attn.qkv.weight"] = whole
    save_file(tensors, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with open_llm(tmp_path, "disk") as llm:
        check_tree(runner_of(llm), model)
    turned = WeightConverter("self_attn.qkv.weight", "self_attn.q_proj.weight", [Transpose(0, 1)])
    monkeypatch.setitem(table, "LlamaForCausalLM", [turned])
    with pytest.raises(UnsupportedModelError, match=r"qkv.weight' requires conversion \(Transpose"):
        open_llm(tmp_path)


@pytest.mark.parametrize(("kind", "changes", "reason"), [
    ("mamba", {}, "'linear_attention' keep state other than keys and values"),
    ("kimi_linear", {}, "'linear_attention' keep state"),
    ("lfm2", {}, "'conv' keep state"),
    ("t5", {"is_encoder_decoder": True}, "encoder-decoder"),
    ("rembert", {}, "use custom attention code"),
    ("bart", {"is_encoder_decoder": False}, "no position_ids argument"),
    ("vit", {}, "no causal language model"),
    ("llama", {"model_type": "new", "auto_map": {"AutoModelForCausalLM": "modeling_new.New"}},
        "remote code is not run"),
])  # fmt: skip
def test_unsupported_models_are_refused_with_a_reason(kind, changes, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        parse_architecture(tiny_config(kind).to_dict() | changes)


@pytest.mark.parametrize(("kind", "changes", "n"), [
    ("phi3", {"original_max_position_embeddings": 128, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
        "long_factor": [1.0] * 8}}, 128),
    ("glm_moe_dsa", {"index_topk": 100}, 100),
])  # fmt: skip
def test_context_ends_where_longrope_changes_or_an_indexer_selects(kind, changes, n):
    """Beyond it the rotations of all positions depend on how long the sequence is."""
    assert parse_architecture(tiny_config(kind).to_dict() | changes).max_positions == n


def test_linear_biases_keep_16_bits_of_slopes_and_positions():
    slopes = torch.tensor([0.84090, 0.0110485, 0.00390625])
    positions = torch.tensor([[0, 1, 255, 256, 257, 3001, 60001]])
    q = torch.zeros(1, 3, 1, 4).bfloat16()
    k = torch.zeros(1, 1, 7, 4).bfloat16()
    q, k = _with_positions(q, k, slopes, positions)
    biases = (q.double() @ k.double().mT)[0, :, 0]
    expected = slopes.double()[:, None] * positions
    assert bool(((biases - expected).abs() <= 2**-16 * expected).all())


def test_page_lists_the_obstacle_of_every_unsupported_type():
    root = Path(__file__).parents[2]
    lines = (root / "bench/results/models.jsonl").read_text().splitlines()
    types = {line["result"]: line["types"].keys() for line in map(json.loads, lines)}
    text = (root / "docs/reference/models.md").read_text()
    rows = text.partition("**Unsupported types**")[2].partition("**Weights**")[0].splitlines()
    listed = [name for row in rows[4:] if row for name in row.split("|")[2].strip().split(", ")]
    assert sorted(listed) == sorted([*types["refused"], *types["no reference"]])


@pytest.mark.parametrize(
    ("kind", "n_products"),
    [
        *((kind, 0) for kind in ("qwen3_moe", "gpt_oss", "qwen3_next")),
        *(("qwen3_moe", 2), ("mxfp4", 2), ("gptq", 3)),
    ],
)
def test_cuda_passes_need_no_host_waits(
    model_of, mxfp4_checkpoint, tmp_path, monkeypatch, kind, n_products
):
    """Experts stored separately, in one tensor with biases, beside gated delta nets, as codes with
    biases or zero points.

    n_products  launches of the kernel per layer; 0: without kernels
    """
    has_kernels = n_products > 0
    if kind == "mxfp4":
        folder = mxfp4_checkpoint
        options = {"quantization_config": Mxfp4Config(dequantize=True), "dtype": torch.float32}
        model = GptOssForCausalLM.from_pretrained(folder, **options).eval()
    elif kind == "gptq":
        choice = Choice("gptq", group_size=32)
        model, plain = model_of("qwen3_moe")
        stored, exact = quantized(load_file(plain / "model.safetensors"), choice)
        assert any("experts.3.up_proj" in name for name in stored.keys() - exact.keys())
        folder = rewrite(plain, tmp_path / "coded", stored, quantization_config=config_of(choice))
        model = type(model).from_pretrained(rewrite(plain, tmp_path / "exact", exact))
    elif has_kernels:
        folder = tmp_path
        model = random_model(tiny_config(kind)).bfloat16()
        model.save_pretrained(folder)
        model.float()
    else:
        model, folder = model_of(kind)
    histc = torch.histc  # that of a CPU counts no integers
    monkeypatch.setattr(torch, "histc", lambda x, **bins: histc(x.float(), **bins).int())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    products = []
    monkeypatch.setattr(
        traced_experts,
        "multiply_stack",
        lambda *given: products.append(0) or multiply_stack(*given),
    )
    prompt = prompt_of(0, 15, 150)
    n = len(prompt)
    dtype = "bfloat16" if has_kernels else "float32"
    settings = {"device": "cuda", "drafter": "none", "max_model_len": 64, "dtype": dtype}
    with (
        fake_gpu(monkeypatch, has_kernels=has_kernels) as counts,
        LLM(str(folder), **settings) as llm,
    ):
        runner = runner_of(llm)
        step = Step(runner.new_cache(20), torch.tensor(prompt), Topology.chain(n), n, n)
        runner.forward([step])  # brings frequencies to the card
        products.clear()
        before = counts.n_waits
        (got,) = runner.forward([step])
        runner.commit(step.cache, range(n))
        assert counts.n_waits == before
        assert len(products) == n_products * runner.spec.n_layers
        expected = logits_of(model, prompt)
        error = (got.cpu().float() - expected).abs()
        if has_kernels:  # rounded to bfloat16 in every layer, which may change an expert
            assert float(error.mean()) < 0.03 * float(expected.std())
        else:
            assert float(error.max()) < ATOL * float(expected.abs().max())

"""Logits of every family against transformers: prompts, trees, dtypes, rotations."""

from contextlib import nullcontext

import pytest
import torch
from support.tiny import (
    CASES,
    DYNAMIC,
    LINEAR,
    LLAMA3,
    SIZES,
    YARN,
    check_tree,
    feed,
    logits_of,
    open_llm,
    prompt_of,
    runner_of,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from offload_rt.errors import UnsupportedModelError
from offload_rt.executor import runner as runner_module
from offload_rt.models.rope import Rope, RopeConfig
from offload_rt.tree.topology import Topology
from offload_rt.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(
    ("name", "chunk_rows"), [*((name, 7) for name in CASES), ("llama", 512), ("mistral", 512)]
)
def test_tree_nodes_see_their_path(zoo, name, chunk_rows, monkeypatch):
    """Below missing and cached tokens, longer than the window in both parts."""
    monkeypatch.setattr(runner_module, "CHUNK_ROWS", chunk_rows)
    with open_llm(zoo.directory(name, 0), "disk") as llm:
        check_tree(runner_of(llm), zoo.model(name, 0), 24)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2-window", "qwen3"])
def test_bfloat16_differs_only_by_rounding(zoo, name):
    """No more than transformers, against float32; greedy tokens are the best up to rounding."""
    prompt = prompt_of(0)
    with open_llm(zoo.directory(name, 0, torch.bfloat16), "mixed") as llm:
        runner = runner_of(llm)
        assert runner.dtype == torch.bfloat16
        tokens = llm.generate(prompt).pop().token_ids
        text = prompt + tokens
        got = feed(runner, runner.new_cache(len(text)), text, Topology.chain(len(text)))
    exact = logits_of(CASES[name].build(0, torch.bfloat16).float(), text)
    # With ATEN_CPU_CAPABILITY=default, torch's flash attention in bfloat16 fails on CPUs with AMX.
    with sdpa_kernel(SDPBackend.MATH):
        rounding = logits_of(zoo.model(name, 0, torch.bfloat16), text).float() - exact
    # Measured with AVX-512, AVX2 and neither: 0.93 to 1.1 times.
    assert (got.float() - exact).square().mean().sqrt() < 1.25 * rounding.square().mean().sqrt()
    before = exact[len(prompt) - 1 : -1]
    chosen = before.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (before.amax(-1) - chosen).max() < 2 * rounding.abs().max()


@pytest.mark.parametrize("name", ["llama-tied", "qwen3"])
def test_flops_of_a_layer_equal_those_of_transformers(zoo, name):
    """Without norms, which torch does not count; torch counts masked keys, too."""

    def counted(n_rows):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            logits_of(zoo.model(name, 0), prompt_of(0, n_rows))
        layers = counter.get_flop_counts().items()
        return next(sum(of.values()) for module, of in layers if module.endswith(".layers.2"))

    spec = open_checkpoint(zoo.directory(name, 0)).spec
    norms = sum(shape[0] for _, shape in spec.layer_tensors(2) if len(shape) == 1)
    by_key = (counted(8) - 2 * counted(4)) / 32
    for n_rows, context in ((4, 0), (8, 0), (8, 100)):
        expected = counted(n_rows) + n_rows * (context * by_key + 2 * norms)
        assert spec.flops(2, n_rows, context) == expected


ROPES = {
    "default": {},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": {"rope_parameters": (YARN["rope_parameters"] | {"mscale": 0.7,
        "mscale_all_dim": 0.4, "truncate": False})},
    "yarn-attention": {"rope_parameters": YARN["rope_parameters"] | {"attention_factor": 1.3,
        "beta_fast": 16}},
    "longrope": {"rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0,
        "original_max_position_embeddings": 64,
        **dict.fromkeys(("short_factor", "long_factor"), [1.0, 1.5, 2.0, 4.0] * 2)}},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rotations_equal_transformers(kind):
    """Past the limit, dynamic scaling depends on the length; rows of a pass differ in length."""
    config = LlamaConfig(**SIZES | ROPES[kind])
    lengths = torch.tensor([1, 255, 300, 256, 257, 700, 300])
    rows = [torch.arange(n) for n in lengths]
    got = Rope(config).cos_sin(torch.cat(rows), lengths.repeat_interleave(lengths), torch.float32)
    expected = [LlamaRotaryEmbedding(config)(torch.zeros(()), row[None]) for row in rows]
    for ours, *theirs in zip(got, *expected, strict=True):
        torch.testing.assert_close(ours, torch.cat(theirs, 1)[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("scaling", "head_dim", "words"), [
    ({}, 2, None), ({}, 1, "head_dim is 1"), ({}, 3, "head_dim is 3"),
    ({"type": "yarn", "factor": 2.0}, 2, None), ({"type": "yarn"}, 2, "'factor' is missing"),
    ({"type": "unheard"}, 2, "rope type 'unheard'"), ({"type": 5}, 2, "rope type 5"),
    ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, 2, "factor differ"),
])  # fmt: skip
def test_rope_settings_are_complete_or_refused(scaling, head_dim, words):
    """The length of the config is the default of the original length."""
    raw = {"max_position_embeddings": 64, "rope_scaling": scaling}
    expected = raw | {"rope_scaling": scaling | {"original_max_position_embeddings": 64}}
    positions = torch.arange(9)
    with nullcontext() if words is None else pytest.raises(UnsupportedModelError, match=words):
        ropes = [Rope(RopeConfig.from_config(each, head_dim)) for each in (raw, expected)]
        first, second = (rope.cos_sin(positions, positions + 1, torch.float32) for rope in ropes)
        assert all(map(torch.equal, first, second)) and first[0].shape == (9, head_dim)

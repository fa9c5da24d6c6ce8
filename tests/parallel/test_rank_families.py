"""Ranks divide mixtures, gated delta nets, models without a plan, streamed experts; pipelines."""

import itertools
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.fixtures import EIGHT_EXPERTS, random_models
from support.heads import few_tokens, random_head, small_target, write_head
from support.programs import started
from support.thread_ranks import MINE, Board, ThreadRanks, divided_tokens, together, tokens_of
from support.tiny import generate, keep_steady, measure_little, open_llm, prompt_of
from torch import Tensor
from transformers.integrations.moe import grouped_mm_experts_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import bench.models.tiny
from bench.models.tiny import config_of, random_model
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.engine import ranks_spec
from offload_rt.errors import SettingsError, UnsupportedModelError
from offload_rt.models import traced_experts
from offload_rt.models.families import parse_architecture
from offload_rt.models.layers import ExpertShare
from offload_rt.models.native import EMBED, HEAD
from offload_rt.parallel.pipeline_model import divide_layers, divisible
from offload_rt.parallel.tensor_parallel import TensorParallelModel
from offload_rt.weights.checkpoint import open_checkpoint

pytestmark = [pytest.mark.numeric, pytest.mark.usefixtures("empty_cache")]
# New in each: states and a shared expert; single experts; norms of heads; fused experts, biases,
# no plan; attention without a plan; other projections; no linear modules; tables beside the
# embedding; linear modules without a plan; norms behind the projections; biases of the plan.
MIXTURES = ["qwen3_next", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"]
KINDS = [*MIXTURES, "qwen3_5_text", "gpt2", "gemma3n_text", "stablelm", "gemma2", "starcoder2"]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """Return a function from model type to a model of eight experts and its checkpoint."""
    # The sum of four experts has an order.
    return random_models(tmp_path_factory, **EIGHT_EXPERTS, num_experts_per_tok=4)


@pytest.mark.parametrize(
    ("kind", "is_exact"),
    [*((kind, False) for kind in KINDS), ("qwen3_5_text", True), ("phi3", True),
     ("olmo2", False), ("olmo2", True)],
)  # fmt: skip
def test_greedy_tokens_of_two_ranks_equal_transformers(model_of, kind, is_exact):
    """With layers in memory; and exactly, with layers of the disk."""
    model, folder = model_of(kind)
    prompt = prompt_of(0, 15, 150)
    place = "disk" if is_exact else "resident"
    settings = {"dtype": "float32", "place": place, "exact_parallel": is_exact}
    assert divided_tokens(2, folder, prompt, 8, **settings) == generate(model, prompt, 8)


@pytest.mark.parametrize(
    ("kind", "place"),
    [("qwen3_next", "disk"), ("qwen3_moe", "resident"), ("gpt_oss", "disk"), ("llama", "resident")],
)
def test_exact_ranks_equal_one_rank_bit_for_bit(model_of, kind, place):
    """In bfloat16, which exposes the order of sums."""

    def work() -> Tensor:
        params = SamplingParams(max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
        settings = {"dtype": "bfloat16", "place": place, "exact_parallel": True}
        with open_llm(model_of(kind)[1], **settings) as llm:
            output = llm.generate([prompt_of(3, 12, 150)], params)[0]
            ranks = llm.engine.runner.spec.ranks if hasattr(MINE, "ranks") else None
            # Sums of embeddings alone; the rest is gathered.
            if kind == "llama" and ranks is not None:
                assert ranks.n_reduced == ranks.n_gathered // (1 + 4 * 4)
        rows = [row for row in (*output.prompt_logprobs, *output.logprobs) if row]
        return torch.tensor([[row[token].logprob for token in sorted(row)] for row in rows])

    assert torch.equal(work(), together(2, work)[0])


def test_fused_expert_codes_are_divided(mxfp4_checkpoint):
    given = mxfp4_checkpoint, prompt_of(0, 15, 150), 12
    settings = {"dtype": "float32", "place": "disk"}
    expected = divided_tokens(1, *given, **settings)
    assert divided_tokens(2, *given, **settings, exact_parallel=True) == expected


@pytest.mark.parametrize(("size", "is_exact"), [(2, True), (3, False)])
def test_grouped_products_of_ranks_sum_to_the_whole(size, is_exact):
    experts = random_model(config_of("qwen3_moe")).model.layers[0].mlp.experts
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 64, generator=generator)
    scores = torch.rand(9, 2, generator=generator)
    chosen = torch.rand(9, 4, generator=generator).argsort(1)[:, :2]
    whole = {name: parameter.data for name, parameter in experts.named_parameters()}
    expected = experts(hidden, chosen, scores)
    total = 0
    for rank in range(size):
        own = range(4 * rank // size, 4 * (rank + 1) // size)
        for name, weight in whole.items():
            part = torch.nn.Parameter(weight[own.start : own.stop], requires_grad=False)
            setattr(experts, name, part)
        share = ExpertShare(own, is_exact, lambda x: x)
        grouped = partial(traced_experts._renumbered, own, grouped_mm_experts_forward, experts)
        total = total + traced_experts.mix_of_all(share, grouped, hidden, chosen, scores)
    torch.testing.assert_close(total, expected, atol=1e-4, rtol=1e-4)
    assert experts.num_experts == 4


# Of a pipeline: the parts that layers are divided into at least, and how many layers there are.
PARTS = {
    "qwen3_next": [range(4), range(4, 8)],
    "gemma3n_text": [range(1), range(1, 2), range(2, 3), range(3, 8)],
    "qwen3_moe": [range(1), range(1, 2), range(2, 3), range(3, 4)],
}
BUDGETS = {"qwen3_next": 3_300_000, "gemma3n_text": 3_850_000, "qwen3_moe": 1_900_000}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "drafter"),
    [("qwen3_next", "none"), ("gemma3n_text", "recycle"), ("qwen3_moe", "recycle")],
)
def test_pipeline_stages_equal_one_rank(monkeypatch, tmp_path, kind, drafter):
    """With states per layer, shared keys and values of other layers, and streamed experts."""
    measure_little(monkeypatch)
    # Two layers attend to what the fourth layer keeps.
    sizes = {"num_hidden_layers": PARTS[kind][-1].stop, "num_kv_shared_layers": 3}
    for name, size in sizes.items():
        monkeypatch.setitem(bench.models.tiny.SIZES, name, size)
    model = random_model(config_of(kind))
    model.save_pretrained(tmp_path / kind)
    assert divisible(open_checkpoint(tmp_path / kind).spec) == PARTS[kind]
    prompts = [prompt_of(0, 70, 150), prompt_of(1, 9, 150)]

    def work() -> list[list[int]]:
        settings = {
            "device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "drafter": drafter,
            "dtype": "float32", "pipeline": 2, "device_memory": BUDGETS[kind],
        }  # fmt: skip
        settings |= {} if drafter == "none" else {"tree_size": 8}
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        with LLM(str(tmp_path / kind), **settings) as llm:
            outputs = llm.generate(prompts, params)
            assert drafter == "none" or not llm.plan.is_resident
            # The first goes back to a place before its end, and on from there.
            again = tokens_of(llm, prompts[0] + outputs[0].token_ids[:5], 5)
            return [*(output.token_ids for output in outputs), again]

    first, second = (generate(model, prompt, 10) for prompt in prompts)
    assert together(2, work)[0] == [first, second, first[5:]]


@pytest.mark.parametrize(
    ("kind", "head"),
    [("gpt_oss", "eagle"), ("gemma2", "dflash2"), ("qwen3_5_text", "block"), ("llama", "block"),
     ("llama", "eagle"), ("llama", "peagle"), ("llama", "medusa"), ("llama", "nextn")],
)  # fmt: skip
def test_heads_of_rank_0_use_the_tables_of_all_ranks(tmp_path, monkeypatch, kind, head):
    keep_steady(monkeypatch)
    if head in ("medusa", "nextn"):
        model = few_tokens()
        settings = random_head(tmp_path, head, model).settings
    else:
        model = small_target(kind, tmp_path / "target")
        settings = write_head(tmp_path / "head", tmp_path / "target", head).settings
    prompt = prompt_of(0, 9, 8)
    x = torch.randn(3, model.get_input_embeddings().weight.shape[1])

    def work() -> tuple[list[int], Tensor, Tensor]:
        with open_llm(**settings) as llm:
            tokens = tokens_of(llm, prompt)
            weights = llm.engine.draft.non_layer
            table = weights.rows(torch.arange(8), EMBED)
            return tokens, table, weights.target.linear(x, weights.shared[HEAD])

    tokens, table, product = together(2, work)[0]
    assert tokens == generate(model, prompt, 16)
    torch.testing.assert_close(table, model.get_input_embeddings().weight, atol=0, rtol=0)
    expected = x @ model.get_output_embeddings().weight.T
    torch.testing.assert_close(product, expected, atol=1e-4, rtol=1e-4)


PUBLISHED = [*MIXTURES, "stablelm", "gpt2", "qwen3_5_text", "gemma3n_text"]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_rank_holds_its_share_of_the_bytes(kind):
    """At most 1.03 of them, by the shapes of transformers' default configs."""
    n_layers = 8 if kind != "gemma3n_text" else 30
    spec = parse_architecture(CONFIG_MAPPING[kind](num_hidden_layers=n_layers).to_dict())

    def numbers(spec: Any) -> int:
        tensors = list(spec.non_layer_tensors())
        for i in range(spec.n_layers):
            tensors += spec.layer_tensors(i)
        return sum(math.prod(shape) for _, shape in tensors)

    for size, is_exact in ((2, True), (4, False)):
        most = max(
            numbers(TensorParallelModel.for_rank(spec, ThreadRanks(rank, Board(size)), is_exact))
            for rank in range(size)
        )
        assert most <= 1.03 * numbers(spec) / size, (kind, size)


@pytest.mark.parametrize("kind", MIXTURES)
def test_ranks_hold_all_routers(model_of, kind):
    """Routers work ahead of their turn without other ranks."""
    spec = open_checkpoint(model_of(kind)[1]).spec
    part = TensorParallelModel.for_rank(spec, ThreadRanks(0, Board(4)), False)
    for i in spec.mixture.layers:
        router = spec.model.mixtures[i].router
        shapes = {tuple(parameter.shape) for parameter in router.parameters()} if router else set()
        others = {
            tensor for tensor in spec.layer_tensors(i) if tensor.name not in spec.expert_names(i)
        }
        routers = {tensor for tensor in others if tensor.shape in shapes}
        assert routers and routers <= set(part.layer_tensors(i))


@pytest.mark.parametrize(("kind", "changes", "size", "words"), [
    ("qwen3_moe", {"num_local_experts": 2}, 4, "have 2 experts"), ("stablelm", {}, 3, "64 outputs"),
    ("llama", {"intermediate_size": 97}, 2, "97 outputs"),
])  # fmt: skip
def test_indivisible_models_are_refused(kind, changes, size, words):
    spec = parse_architecture(config_of(kind).to_dict() | changes)
    with pytest.raises(UnsupportedModelError, match=words):
        TensorParallelModel.for_rank(spec, ThreadRanks(0, Board(size)), False)


_SCRIPT = """
import json, os, sys
import torch
from offload_rt import LLM, SamplingParams
from offload_rt.executor import runner
from offload_rt.cost.pass_times import (ComputeTimes)
settings, prompts, params, n_parts = json.loads(sys.argv[1])
runner.CHUNK_ROWS = 64
# Ranks divide the cores; sums with different thread counts round differently.
os.sched_getaffinity = lambda _: {0}
torch.set_num_threads(1)
if n_parts:
    ComputeTimes.n_parts = lambda self, n_rows, n_stages: min(n_rows, n_parts)
with LLM(device="cpu", **settings) as llm:
    for seed in (0, 1):
        sampling = SamplingParams(max_tokens=12, logprobs=3, seed=seed, ignore_eos=True, **params)
        for output in llm.generate(prompts, sampling):
            print(json.dumps([output.token_ids, output.prompt_logprobs, output.logprobs]))
    print(json.dumps(llm.plan.tiers), file=sys.stderr)
"""


def _said(folder: Path, n: int, settings: dict, prompts: list, n_parts: int = 0, **params: object):
    """Return the output of ranks and the tiers of rank 0; `n_parts` fixes the parts of a pass."""
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(_SCRIPT)
    settings = settings | ({"pipeline": n} if n > 1 else {})
    arguments = [json.dumps([settings, prompts, params, n_parts])]
    with started(str(script), arguments, folder, n) as ranks:
        assert [rank.code() for rank in ranks] == [0] * n, [rank.err[-2000:] for rank in ranks]
        assert not any(rank.out for rank in ranks[1:])
        return ranks[0].out, json.loads(ranks[0].err.splitlines()[-1])


def test_streamed_pipeline_equals_one_rank_bit_for_bit(zoo, tmp_path):
    """Read all rows of a prompt of three chunks beside a short prompt."""
    settings = {"model": str(zoo.directory("llama-tied", 0)), "drafter": "none"}
    settings |= {"max_num_seqs": 2, "max_model_len": 180}
    with LLM.open(EngineConfig(**settings, device="cpu")) as whole:
        little = {"device_memory": whole.plan.reserved.total + whole.plan.slot_nbytes}
    prompts = [prompt_of(0, 150), prompt_of(1, 30)]
    params = {"temperature": 0.8, "prompt_logprobs": 0}
    text, tiers = _said(tmp_path / "several", 2, settings | little, prompts, **params)
    assert text == _said(tmp_path / "one", 1, settings, prompts, **params)[0]
    assert len(text.splitlines()) == 4 and "disk" in tiers


def test_pipeline_with_draft_model_gives_the_targets_tokens(pair, tmp_path):
    """The draft is on rank 0; rows of a tree pass in three parts."""
    settings = {"model": str(pair.target), "draft_model": str(pair.draft)}
    settings |= {"max_model_len": 128, "tree_size": 8}
    text, tiers = _said(tmp_path / "ranks", 2, settings, [prompt_of(0)], 3, temperature=0)
    expected = generate(pair.model, prompt_of(0), 12)
    assert [json.loads(line)[0] for line in text.splitlines()] == [expected] * 2
    assert {*tiers} == {"device"}


def test_pipeline_requires_as_many_ranks(zoo):
    with pytest.raises(SettingsError, match="has 1 started, and 6 layers; start it by"):
        LLM(str(zoo.directory("llama", 0)), device="cpu", pipeline=2)


@pytest.mark.parametrize("kind", ["eagle", "peagle", "block"])
def test_heads_of_hidden_states_are_refused_with_a_pipeline(tmp_path, monkeypatch, kind):
    few_tokens().save_pretrained(tmp_path / "target")
    settings = write_head(tmp_path / "head", tmp_path / "target", kind).settings
    two_ranks = SimpleNamespace(rank=0, size=2, n_local=2)
    monkeypatch.setattr(ranks_spec, "joined", lambda: two_ranks)
    with pytest.raises(SettingsError, match=f'drafter="{kind}" with pipeline: needs a drafter'):
        open_llm(pipeline=2, **settings)


@pytest.mark.parametrize("n_stages", [2, 4])
def test_pipeline_parts_minimise_the_pass_time(n_stages):
    """Reading the weights takes as long as computing 50 rows."""
    times = ComputeTimes((1, 512), (64, 128), ((51.0, 562.0), (51.0, 562.0)))

    def seconds(n_rows: int, n_parts: int) -> float:
        ends = [0.0] * n_stages  # of the last part in each stage
        for _ in range(n_parts):
            for stage in range(n_stages):
                ends[stage] = (
                    max(ends[stage], ends[stage - 1] if stage else 0.0)
                    + (50 + n_rows / n_parts) / n_stages
                )
        return ends[-1]

    pipelined = times.pipelined(n_stages)
    falling = ComputeTimes((1, 8), (64, 128), ((2.0, 1.0), (2.0, 1.0)))
    assert falling.n_parts(500, n_stages) >= 1  # as a line through noise may
    for n_rows in (1, 16, 64, 512):
        best = min(seconds(n_rows, n) for n in range(1, min(n_rows, 16) + 1))
        chosen = seconds(n_rows, times.n_parts(n_rows, n_stages))
        assert best <= chosen <= 1.05 * best
        if n_rows in times.widths:
            assert pipelined.at(np.array([n_rows]), 64)[0] == pytest.approx(chosen)
    assert times.n_parts(1, n_stages) == 1 < times.n_parts(512, n_stages)


@pytest.mark.parametrize("seed", range(20))
def test_layer_division_minimises_the_fullest_rank(seed):
    chance = np.random.default_rng(seed)
    n = int(chance.integers(3, 9))
    n_ranks = int(chance.integers(1, 4))
    sizes = chance.integers(1, 10, n).tolist()
    rooms = chance.integers(1, 30, n_ranks).tolist()
    parts = divide_layers(sizes, rooms)

    def load(stops: tuple[int, ...]) -> float:
        ranges = itertools.pairwise((0, *stops, n))
        return max(sum(sizes[a:b]) / room for (a, b), room in zip(ranges, rooms, strict=True))

    best = min(load(stops) for stops in itertools.combinations(range(1, n), n_ranks - 1))
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == n
    assert load(tuple(part.stop for part in parts[:-1])) == pytest.approx(best)

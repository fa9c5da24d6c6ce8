"""The engine with emulated kernels in place of the references."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from support import emulated
from support.fake_gpu import FakeCudaTensor, fake_gpu, record_graph
from support.languages import RECIPES, languages, target_probs
from support.tiny import (
    CASES,
    feed,
    least_streaming,
    open_llm,
    prefill,
    prompt_of,
    random_tree,
    runner_of,
    sequence_of,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_rt import LLM, ops
from offload_rt.executor.captured_passes import capture_passes
from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.ops import TreeMask, cpu, extension
from offload_rt.speculate.select import load_rule


class Served:
    """Stands for the ops of the library and counts calls."""

    def __init__(self):
        self.counts = Counter()
        self._ops = getattr(torch.ops, emulated.load())

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(self._ops, name)


@pytest.fixture
def served(monkeypatch):
    """From here on, emulated kernels serve tensors of the CPU."""
    served = Served()
    monkeypatch.setattr(extension, "serves", lambda _: True)
    monkeypatch.setattr(extension, "kernels", lambda: served)
    monkeypatch.setattr(cpu, "library", lambda: None)
    return served


def logits_of_passes(runner):
    """Of a prompt, and of trees of almost the same size, each below a path of the last."""
    cache = prefill(runner, prompt_of(0, 20), 300)
    logits = []
    for seed, n in enumerate((6, 8, 5, 7, 8)):
        tree = random_tree(n, seed)
        logits.append(feed(runner, cache, prompt_of(seed, n), tree).clone())
        runner.commit(cache, [0, *tree.path_to(n - 1)])
    return logits


def assert_close(mine, plain):
    for own, other in zip(mine, plain, strict=True):
        # Rounded to bfloat16 in every layer, twice differently; a row that is missed or added moves
        # logits by their spread.
        assert float((own.float() - other.float()).abs().mean()) < 0.1 * float(other.float().std())


@pytest.fixture(params=["llama", "mistral", "qwen3-window"])
def bfloat16_model(request, tmp_path):
    """With windows shorter than the paths too; with heads of 64."""
    model = CASES[request.param].build(0, torch.bfloat16, head_dim=64, num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_kernel_logits_equal_the_reference(served, monkeypatch, bfloat16_model):
    """Directly, and captured with other trees and cache lengths, without a dense mask."""
    monkeypatch.setattr(TreeMask, "dense", None)
    with open_llm(bfloat16_model) as plain, open_llm(bfloat16_model) as graphs:
        direct = logits_of_passes(runner_of(plain))
        before = served.counts.copy()
        assert before["tree_attention"] and before["commit_rows"]
        capture_passes(runner_of(graphs), GraphShape(32, 512, 64), record_graph)
        captured = logits_of_passes(runner_of(graphs))
        # The prompt; the first of the trees, and the one that is captured.
        served.counts -= before
        assert served.counts["tree_attention"] == 3 * runner_of(graphs).spec.n_layers
        monkeypatch.undo()
        expected = logits_of_passes(runner_of(plain))
    assert_close(direct, expected)
    assert_close(captured, expected)


class Launches(TorchDispatchMode):
    """Counts kernels of torch: calls but for views, new memory, copies of a tensor to itself."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs, out))
        places = {leaf.inner.data_ptr() for leaf in leaves if isinstance(leaf, FakeCudaTensor)}
        is_no_copy = name == "copy_" and len(places) == 1
        is_free = func.is_view or name in ("_unsafe_view", "empty", "new_empty", "detach")
        self.n += bool(places) and not is_no_copy and not is_free
        return out


@pytest.fixture
def card(monkeypatch):
    """Call counts of a fake GPU with emulated kernels."""
    with fake_gpu(monkeypatch, has_kernels=True) as counts:
        yield counts


def on_card(directory, place):
    """Open a model with all layers streamed, or with captured passes."""
    settings = {"device": "cuda", "max_model_len": 128, "drafter": "none"}
    streamed = {"device_memory": least_streaming(directory, **settings)}
    llm = LLM(str(directory), **settings, **(streamed if place == "streamed" else {}))
    if place == "captured":
        capture_passes(runner_of(llm), GraphShape(32, 256, 64), record_graph)
    assert bool(runner_of(llm).streamer.order) == (place == "streamed")
    return llm


@pytest.mark.parametrize("place", ["streamed", "captured"])
@pytest.mark.parametrize(("name", "n"), [("llama", 11), ("llama-biases", 11), ("qwen3", 13)])
def test_launches_per_layer(card, tmp_path, name, n, place):
    """Launches of three more layers; logits equal the CPU."""
    counts = []
    given = prompt_of(1, 7), random_tree(7, 1)
    for n_layers in (3, 6):
        sizes = {"head_dim": 64, "intermediate_size": 128, "num_hidden_layers": n_layers}
        CASES[name].build(0, torch.bfloat16, **sizes).save_pretrained(tmp_path)
        with on_card(tmp_path, place) as llm, open_llm(tmp_path) as plain:
            mine, other = runner_of(llm), runner_of(plain)
            cache = prefill(mine, prompt_of(0, 20), 96)
            before = card.n_kernels
            with Launches() as launches:
                logits = feed(mine, cache, *given)
            counts.append(launches.n + card.n_kernels - before)
            cache = prefill(other, prompt_of(0, 20), 96)
            assert_close([logits.cpu()], [feed(other, cache, *given)])
    assert counts[1] - counts[0] == 3 * n <= 3 * 14


def test_attention_parts_are_joined_in_one_launch(card):
    out_a, out_b = torch.randn(2, 3, 2, 64).to("cuda")
    lse_a, lse_b = torch.randn(2, 3, 2).to("cuda")
    before = card.n_kernels
    with Launches() as launches:
        ops.merge(out_a, lse_a, out_b.bfloat16(), lse_b)
    assert (card.n_kernels - before, launches.n) == (1, 1), "one of them converts the test's input"


def decided_trees(independent):
    """Yield trees of three tokens with exhausted and tied distributions, and the target's."""
    for name, recipe in RECIPES.items():
        if recipe.independent == independent:
            target, draft = languages(name)
            for tree, _ in itertools.islice(recipe.trees(draft), 0, 200, 4):
                if tree.sampled is not None:  # others go by `match`
                    sampled = replace(tree.sampled, draft_probs=tree.sampled.draft_probs.float())
                    yield replace(tree, sampled=sampled), target_probs(target, tree).float()


@pytest.mark.parametrize("rule", ["sequoia", "specinfer", "traversal"])
def test_kernel_verdicts_equal_the_reference(served, monkeypatch, rule):
    """By the same noise, with the same bonus."""
    rule = load_rule(rule)
    verdicts = []
    trees = list(decided_trees(rule.child_sampling == "independent"))
    for _ in range(2):
        sequence = sequence_of(0)
        verdicts.append([rule.verify(tree, target, sequence) for tree, target in trees])
        monkeypatch.undo()
    assert served.counts["verify"] == len(trees) > 20
    assert verdicts[0] == verdicts[1]

"""The engine with emulated kernels in place of the references."""

import itertools
from collections import Counter
from dataclasses import replace

import emulated
import pytest
import torch
from languages import target_probs
from recorded import record
from test_exactness import RECIPES, languages
from tiny import CASES, feed, open_llm, prefill, prompt_of, random_tree, runner_of, sequence_of

from offload_rt.executor.cuda_graphs import GraphShape
from offload_rt.ops import extension
from offload_rt.speculate.select import rule_of


class Served:
    """Stands for the ops of the library, and counts what is asked of it."""

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
    return served


def logits_of_steps(runner):
    """Of a prompt, a tree below it, and a tree below a path of that one."""
    cache = prefill(runner, prompt_of(0, 20), 96)
    first = random_tree(24, 1, reach=6)
    found = [feed(runner, cache, prompt_of(1, 24), first)]
    runner.commit(cache, [0, *first.path_to(23)])
    tree = random_tree(9, 2).after_chain(3)
    return [*found, feed(runner, cache, prompt_of(2, len(tree)), tree)]


def logits_of_passes(runner):
    """Of a prompt, and of trees of almost the same size, one below the other."""
    cache = prefill(runner, prompt_of(0, 20), 300)
    found = []
    for seed, n in enumerate((6, 8, 5, 7, 8)):
        found.append(feed(runner, cache, prompt_of(seed, n), random_tree(n, seed)).clone())
        runner.commit(cache, [0, 1])
    return found


def assert_close(mine, plain):
    for own, other in zip(mine, plain, strict=True):
        # Rounded to bfloat16 in every layer, twice differently; a row that is missed or added moves logits by their spread.
        assert float((own.float() - other.float()).abs().mean()) < 0.03 * float(other.float().std())


@pytest.fixture(params=["llama", "mistral", "qwen3-window"])
def bfloat16_model(request, tmp_path):
    """With windows shorter than the paths too; with heads of 64."""
    CASES[request.param].build(0, torch.bfloat16, head_dim=64, num_hidden_layers=3).save_pretrained(tmp_path)
    return tmp_path


def test_a_model_computes_the_same(served, monkeypatch, bfloat16_model):
    with open_llm(bfloat16_model) as llm:
        runner = runner_of(llm)
        assert runner.dtype == torch.bfloat16
        mine = logits_of_steps(runner)
        assert served.counts["tree_attention"] and served.counts["tree_masks"] and served.counts["commit_rows"]
        monkeypatch.undo()
        before = served.counts.copy()
        plain = logits_of_steps(runner)
        assert served.counts == before
    assert_close(mine, plain)


def test_a_captured_pass_computes_the_same(served, monkeypatch, bfloat16_model):
    """For other trees and longer caches than those it was captured for."""
    with open_llm(bfloat16_model) as plain, open_llm(bfloat16_model) as graphs:
        runner_of(graphs).use_graphs(GraphShape(32, 512, 64), record)
        mine = logits_of_passes(runner_of(graphs))
        # The prompt; the first of the trees, and the one that is captured.
        assert served.counts["tree_attention"] == 3 * runner_of(graphs).spec.n_layers
        monkeypatch.undo()
        assert_close(mine, logits_of_passes(runner_of(plain)))


def decided_trees(independent):
    """Trees of three tokens, in which distributions run out and tie, and the target's distributions after their nodes."""
    for name, recipe in RECIPES.items():
        if recipe.independent == independent:
            target, draft = languages(name)
            for tree, _ in itertools.islice(recipe.trees(draft), 0, 200, 4):
                if tree.sampled is not None:  # others go by `match`
                    sampled = replace(tree.sampled, draft_probs=tree.sampled.draft_probs.float())
                    yield replace(tree, sampled=sampled), target_probs(target, tree).float()


@pytest.mark.parametrize("rule", ["sequoia", "specinfer", "traversal"])
def test_a_rule_decides_the_same(served, monkeypatch, rule):
    """By the same noise, with the same bonus."""
    rule, verdicts = rule_of(rule), []
    trees = list(decided_trees(rule.child_sampling == "independent"))
    for _ in range(2):
        sequence = sequence_of(0)
        verdicts.append([rule.verify(tree, target, sequence) for tree, target in trees])
        monkeypatch.undo()
    assert served.counts["verify"] == len(trees) > 20
    assert verdicts[0] == verdicts[1]

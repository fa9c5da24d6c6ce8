"""The engine with emulated kernels in place of the references."""

import itertools
from collections import Counter
from dataclasses import replace

import emulated
import pytest
import torch
from languages import target_laws
from test_laws import RECIPES, languages
from tiny import CASES, feed, open_llm, prefill, prompt_of, random_tree, runner_of

from offload_rt import plugins
from offload_rt.ops import _extension


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
    monkeypatch.setattr(_extension, "serves", lambda _: True)
    monkeypatch.setattr(_extension, "kernels", lambda: served)
    return served


def logits_of_steps(runner):
    """Of a prompt, a tree below it, and a tree below a path of that one."""
    cache = prefill(runner, prompt_of(0, 20), 96)
    first = random_tree(24, 1, reach=6)
    found = [feed(runner, cache, prompt_of(1, 24), first)]
    cache.commit([0, *first.path_to(23)])
    tree = random_tree(9, 2).after_chain(3)
    return [*found, feed(runner, cache, prompt_of(2, len(tree)), tree)]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3-window"])
def test_a_model_computes_the_same(served, monkeypatch, tmp_path, name):
    """With windows shorter than the paths too; in bfloat16, with heads of 64."""
    CASES[name].build(0, torch.bfloat16, head_dim=64, num_hidden_layers=3).save_pretrained(tmp_path)
    with open_llm(tmp_path) as llm:
        runner = runner_of(llm)
        assert runner.dtype == torch.bfloat16
        mine = logits_of_steps(runner)
        assert served.counts["tree_attention"] and served.counts["tree_masks"] and served.counts["commit_rows"]
        monkeypatch.undo()
        before = served.counts.copy()
        plain = logits_of_steps(runner)
        assert served.counts == before
    for own, other in zip(mine, plain, strict=True):
        # Rounded to bfloat16 in every layer, twice differently; a row that is missed or added moves logits by their spread.
        assert float((own.float() - other.float()).abs().mean()) < 0.03 * float(other.float().std())


def decided_trees(independent):
    """Trees of three tokens, in which laws run out and tie, and the target's laws after their nodes."""
    for name, recipe in RECIPES.items():
        if recipe.independent == independent:
            target, draft = languages(name)
            for tree, _ in itertools.islice(recipe.trees(draft), 0, 200, 4):
                draws = tree.draws and replace(tree.draws, laws=tree.draws.laws.float())
                yield replace(tree, draws=draws), target_laws(target, tree).float()


@pytest.mark.parametrize("rule", [name for name in plugins.names("rules") if plugins.find("rules", name).NEEDS_LAWS])
def test_a_rule_decides_the_same(served, monkeypatch, rule):
    """By the same noise, with the same bonus."""
    rule, verdicts = plugins.find("rules", rule), []
    trees = list(decided_trees(rule.CHILD_LAW == "independent"))
    for _ in range(2):
        generator = torch.Generator().manual_seed(0)
        verdicts.append([rule.verify(tree, target, generator) for tree, target in trees])
        monkeypatch.undo()
    assert served.counts["verify"] == len(trees) > 20
    assert verdicts[0] == verdicts[1]

"""What a drafter of another kind needs: rows that are computed and never verified, and what the target predicts there."""

from collections.abc import Callable
from collections.abc import Sequence as Several
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from texts import assert_distribution, exact_distributions, run_together, sampled_texts, small_pair
from tiny import CASES, Steady, Zoo, generate, open_llm, prompt_of

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import TopTokens
from offload_rt.speculate.protocols import Drafter, DrafterType, DraftLimits, DraftParts
from offload_rt.speculate.select import Drafting, rule_of
from offload_rt.tree.topology import DraftTree, Topology, Verdict


class ToyLookahead(Drafter):
    """Lookahead in small: a chain of guesses is computed, and what the target predicts there becomes candidates.

    It learns from the guesses alone, not from candidates. Two candidates below the root carry the same token.
    """

    n_predicted = 2

    def __init__(self, parts: DraftParts) -> None:
        self.limits = parts.limits
        self.after: dict[int, list[int]] = {}
        self.guesses: dict[Sequence, list[int]] = {}

    def propose(self, sequences: Several[Sequence], n_nodes: int) -> list[DraftTree]:
        return [self._tree(sequence, n_nodes) for sequence in sequences]

    def _tree(self, sequence: Sequence, n_nodes: int) -> DraftTree:
        root, n_levels = sequence.tokens[-1], min(self.limits.n_levels, sequence.n_left)
        parents, tokens = [-1], [root]
        while n_levels > 1 and len(tokens) < min(n_levels, n_nodes // 2) and tokens[-1] in self.after:
            parents.append(len(tokens) - 1)
            tokens.append(self.after[tokens[-1]][0])
        if 1 < len(tokens) < n_nodes // 2:
            parents += [0, 0]
            tokens += [tokens[1], self.after[root][-1]]
        n_candidates = len(tokens)
        guesses = [root, *self.guesses.get(sequence, [])][: min(n_levels - 1, n_nodes - n_candidates)]
        parents += [0, *range(n_candidates, n_candidates + len(guesses) - 1)][: len(guesses)]
        topology = Topology(np.array(parents))
        return DraftTree(topology, torch.tensor(tokens + guesses), n_unverified=len(guesses))

    def learn(self, sequence: Sequence, tree: DraftTree, verdict: Verdict, predicted: TopTokens | None) -> None:
        assert predicted is not None and predicted.tokens.shape == predicted.probs.shape == (len(tree.topology), 2)
        assert max(verdict.path, default=0) < len(tree.candidates().topology)
        rows = range(len(tree.candidates().topology), len(tree.topology))
        self.after |= {int(tree.tokens[row]): predicted.tokens[row].tolist() for row in rows}
        self.guesses[sequence] = [int(predicted.tokens[row, 0]) for row in rows]

    def end(self, sequence: Sequence) -> None:
        self.guesses.pop(sequence, None)


TOY = DrafterType(ToyLookahead, needs_model=False, gives_draft_probs=False, best_rule="match", default_sizes=(16, 1))


def open_toy(directory: Path, rule: str = "match") -> LLM:
    """An LLM with a drafter that is in no folder."""
    config = EngineConfig(str(directory), device="cpu", max_model_len=256, tree_size=24)
    llm = LLM.open(config, Drafting("toy", TOY, rule_of(rule)))
    llm.load()
    return llm


@pytest.mark.parametrize("rule", ["match", "sequoia", "traversal"])
def test_greedy_tokens_are_transformers_with_rows_that_are_never_verified(zoo: Zoo, rule: str) -> None:
    pair = zoo.pair("llama", 0)
    prompts = [prompt_of(seed, n) for seed, n in enumerate((9, 1, 30))]
    with open_toy(pair.target, rule) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_new_tokens=24))
        assert isinstance(llm.engine.drafter, ToyLookahead)
        llm.engine.reset_prefix_cache()
        assert llm.engine.drafter.after and not llm.engine.drafter.guesses, "ended sequences are released"
    assert [one.token_ids for one in outputs] == [generate(pair.model, prompt, 24) for prompt in prompts]


def test_predictions_of_rows_that_are_never_verified_become_accepted_tokens(tmp_path: Path) -> None:
    """The next token follows from the last alone, so that a prediction holds wherever its token stands."""
    model = CASES["llama"].build(3, num_hidden_layers=3)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path)
    with open_toy(tmp_path) as llm:
        output = llm.generate([1], SamplingParams(max_new_tokens=100))[0]
    assert output.token_ids == generate(model, [1], 100)
    assert output.stats.tokens_per_pass > 2


def test_the_joint_distribution_with_rows_that_are_never_verified(tmp_path: Path) -> None:
    pair = small_pair(tmp_path)
    with open_llm(pair.target, max_model_len=64) as llm:
        drafter = ToyLookahead(DraftParts(DraftLimits(10, 4), Steady(), "without_replacement"))
        texts = sampled_texts(llm.engine.runner, drafter, rule_of("match"), 10)
    for found, probs in zip(texts, exact_distributions(pair.model), strict=True):
        assert_distribution(found, probs)


class Watched:
    """A rule that keeps the trees it sees."""

    child_sampling = None
    coupled_up_to = 0.0

    def __init__(self) -> None:
        self.trees: list[DraftTree] = []

    def verify(self, tree: DraftTree, target: torch.Tensor, sequence: Sequence) -> Verdict:
        assert len(target) == len(tree.topology)
        self.trees.append(tree)
        return rule_of("match").verify(tree, target, sequence)


def test_unverified_rows_reach_neither_the_rule_nor_the_sequence(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, rule, proposed = zoo.pair("llama", 0), Watched(), []
    propose: Callable[..., list[DraftTree]] = ToyLookahead.propose
    monkeypatch.setattr(ToyLookahead, "propose", lambda *asked: proposed.extend(trees := propose(*asked)) or trees)
    with open_llm(pair.target, max_model_len=64) as llm:
        runner: Runner = llm.engine.runner
        drafter = ToyLookahead(DraftParts(DraftLimits(12, 5), Steady(), "without_replacement"))
        sequence = Sequence(prompt_of(0, 9), SamplingParams(20), 64)
        (text,) = run_together(runner, drafter, rule, [sequence], 12)
    assert text == generate(pair.model, prompt_of(0, 9), 20)
    assert [len(tree.topology) for tree in rule.trees] == [len(tree.candidates().topology) for tree in proposed]
    assert sum(tree.n_unverified for tree in proposed) > 20
    for tree, seen in zip(proposed, rule.trees, strict=True):
        assert torch.equal(seen.tokens, tree.tokens[: len(tree.candidates().topology)]) and seen.n_unverified == 0
    assert any(a == b for tree in rule.trees for a, b in pairwise(sorted(tree.tokens[1:].tolist()))), "equal siblings"

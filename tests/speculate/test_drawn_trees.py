"""Drawn trees beside a grammar or a copied text, over all draws: the exact distribution."""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.languages import (
    VOCABULARY,
    Language,
    distribution_under,
    every_run,
    grow_with,
    outcomes,
)
from support.tiny import exact_draws, sequence_of

from offload_rt.cost.tree_size import Acceptance
from offload_rt.speculate import child_sampling
from offload_rt.speculate.draft import triforce
from offload_rt.speculate.ngrams import append_ngram
from offload_rt.speculate.select import load_rule
from offload_rt.speculate.static_builder import StaticTree, StaticTreeBuilder
from offload_rt.speculate.tree_state import TreeState
from offload_rt.tree.topology import Topology, Verdict


class Letters:
    """A grammar with a random set of allowed tokens after every text."""

    def __init__(self, seed):
        self._seed = seed

    def masks_after(self, paths):
        words = [self._word(path) if self.allows(path) else -1 for path in paths]
        return torch.tensor(words, dtype=torch.int32)[:, None]

    def allows(self, text):
        return all(self.after(text[:i])[token] for i, token in enumerate(text))

    def after(self, text):
        """Whether each token may follow a text within the grammar; at least one may."""
        return [bool(self._word(text) >> token & 1) for token in range(VOCABULARY)]

    def _word(self, text):
        return int(np.random.default_rng((self._seed, *text)).integers(1, 2**VOCABULARY))


class MaskedLanguage(Language):
    def __init__(self, seed, grammar):
        super().__init__(seed, p_impossible=0.0)
        self._grammar = grammar

    def after(self, text):
        allowed = self._grammar.after(tuple(text))
        probs = super().after(text) * torch.tensor(allowed)
        return probs / probs.sum()


def new_state(grammar=None):
    sequence = sequence_of(0)
    sequence.grammar = grammar
    return TreeState(VOCABULARY, 20, sequence, torch.device("cpu"))


def drawn_children(draw, kind):
    """Replace a function of `child_sampling` by a draw from all its outcomes."""

    def children(probs, n, _, excluded=None):
        struck = torch.zeros_like(probs) if excluded is None else excluded
        rows = [
            exact_draws(row.double().numpy(), n, kind == "independent", tokens.nonzero()[:, 0])
            for row, tokens in zip(probs, struck, strict=True)
        ]
        outcomes = (zip(*each, strict=True) for each in itertools.product(*map(dict.items, rows)))
        return torch.tensor(draw((tokens, float(np.prod(q))) for tokens, q in outcomes))

    return children


def every_tree(topology, kind, draft, grammar, copied=()):
    """Every tree that the draws can lead to, with its probability."""
    plan = StaticTree(topology, 1.0, kind, 1.0, copied)

    def run(draw):
        builder = StaticTreeBuilder(new_state(grammar), plan, Acceptance())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child_sampling, kind, drawn_children(draw, kind))
            grow_with(builder, draft.after)
        return append_ngram(builder.tree(0), builder.copied, len(topology) + len(copied))

    return every_run(run)


def every_chain(n, middle, small, n_guesses):
    """Every chain of TriForce, with its probability: `small` guesses for `middle`."""
    kind = "without_replacement"

    def run(draw):
        def verify(tree, target, _):
            end, bonus = draw(
                ((decision.end, bonus), p * q)
                for decision, p in outcomes(TRIFORCE_RULE)(tree, target)
                for bonus, q in enumerate(decision.probs.tolist())
            )
            return Verdict(tuple(tree.topology.path_to(end)), bonus)

        def guess():
            path, n_left = builder.tip(n_guesses)
            if n_left > 0:
                guesses = StaticTree(Topology.chain(1 + n_left), 1.0, kind, 1.0)
                guessing = StaticTreeBuilder(new_state(), guesses, Acceptance())
                grow_with(guessing, lambda after: small.after((*path, *after)))
                builder.guess(guessing.tree(0))

        plan = StaticTree(Topology.chain(n), 1.0, kind, 1.0)
        builder = triforce.ResampledChainBuilder(new_state(), plan, Acceptance())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(child_sampling, kind, drawn_children(draw, kind))
            patch.setattr(triforce, "_RULE", SimpleNamespace(verify=verify))
            grow_with(builder, middle.after, guess)
        return builder.tree(0)

    return every_run(run)


TRIFORCE_RULE = triforce._RULE
RULES = ["specinfer", "sequoia", "traversal"]
SHAPES = {"siblings": [-1, 0, 0], "levels": [-1, 0, 0, 1, 1, 2]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", SHAPES)
def test_distribution_of_pruned_trees_equals_masked_plain_sampling(rule, shape):
    chosen = load_rule(rule)
    topology = Topology(np.array(SHAPES[shape]))
    sizes = set()
    for seed in range(2):
        grammar = Letters(seed)
        draft = Language(2 * seed + 1, p_impossible=0.0)
        trees = [*every_tree(topology, chosen.child_sampling, draft, grammar)]
        assert sum(p for _, p in trees) == pytest.approx(1)
        assert all(grammar.allows(path) for tree, _ in trees for path in tree.paths())
        sizes |= {len(tree.topology) for tree, _ in trees}
        target = MaskedLanguage(2 * seed, grammar)
        probs, _ = distribution_under(outcomes(chosen), trees, target)
        assert float((probs - target.continuations(())).abs().max()) < 1e-7
    assert (len(sizes) > 1) == (chosen.child_sampling == "without_replacement")


@pytest.mark.parametrize(("rule", "n_seeds"), [("specinfer", 1), ("sequoia", 6), ("traversal", 6)])
@pytest.mark.parametrize("copied", [(0,), (2, 1)])
def test_copied_tokens_beside_drawn_children_keep_the_distribution(rule, n_seeds, copied):
    """A likely token is left to sampling. Copies do not depend on the drawn tokens."""
    chosen = load_rule(rule)
    topology = Topology(np.array(SHAPES["levels"]))
    n_copied = set()
    for seed in range(n_seeds):
        draft, target = Language(2 * seed + 1), Language(2 * seed)
        trees = [*every_tree(topology, chosen.child_sampling, draft, None, copied)]
        assert sum(p for _, p in trees) == pytest.approx(1)
        of_trees = {int((~tree.sampled.is_sampled[1:]).sum()) for tree, _ in trees}
        assert len(of_trees) == 1
        n_copied |= of_trees
        probs, _ = distribution_under(outcomes(chosen), trees, target)
        assert float((probs - target.continuations(())).abs().max()) < 1e-6
    assert n_copied == ({0} if rule == "specinfer" else {0, len(copied)})


@pytest.mark.parametrize("n_guesses", [0, 2])
@pytest.mark.parametrize("seed", range(3))
def test_chain_of_triforce_has_the_stated_distribution(seed, n_guesses):
    middle, small = Language(2 * seed), Language(2 * seed + 1)
    chances = Counter()
    for tree, p in every_chain(4, middle, small, n_guesses):
        path = tuple(tree.path_to(3))
        chances[path] += p
        stated = torch.stack([middle.after(path[:i]) for i in range(3)])
        torch.testing.assert_close(tree.sampled.draft_probs.double(), stated, atol=1e-6, rtol=0)
    for path in itertools.product(range(VOCABULARY), repeat=3):
        assert chances[path] == pytest.approx(middle.chance(path), abs=1e-6)

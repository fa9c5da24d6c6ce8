"""Rules by exact enumeration: every outcome of every draw, against the law of plain sampling."""

import itertools
import math

import pytest
import torch
from tiny import random_tree

from offload_rt.rules import match
from offload_rt.tree.topology import DraftTree, Topology, Verdict

VOCABULARY, LONGEST = 3, 4


class _Fork(Exception):
    """Raised at a draw that the script does not decide yet."""

    def __init__(self, law):
        self.law = law


def outcomes(monkeypatch, verify, tree, laws):
    """Every verdict and its probability: the rule runs again for every sequence of outcomes of its draws."""
    found, scripts = [], [((), 1.0)]
    while scripts:
        script, p = scripts.pop()
        left = list(script)

        def draw(law, generator, left=left):
            if not left:
                raise _Fork(law)
            return left.pop(0)

        monkeypatch.setattr(match, "draw", draw)
        try:
            found.append((verify(tree, laws, torch.Generator()), p))
        except _Fork as fork:
            scripts += [((*script, token), p * q) for token, q in enumerate(fork.law.tolist()) if q > 0]
    return found


class Target:
    """A language: a random law after every text, some of them with impossible tokens."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self._laws = {}
        for n in range(LONGEST + 1):
            for text in itertools.product(range(VOCABULARY), repeat=n):
                law = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64)
                law[torch.rand(VOCABULARY, generator=generator) < 0.15] = 0
                self._laws[text] = law / law.sum() if law.sum() else torch.eye(VOCABULARY, dtype=torch.float64)[0]

    def after(self, text):
        return self._laws[tuple(text)]

    def probability(self, text, start=0):
        """Of the tokens of `text` from `start` on, given those before."""
        return math.prod(float(self.after(text[:n])[text[n]]) for n in range(start, len(text)))


def error_of(monkeypatch, verify, tree, target):
    """The largest error of the law of the first LONGEST tokens, what a rule leaves open completed by plain sampling."""
    laws = torch.stack([target.after(tree.path_to(node)) for node in range(len(tree.topology))])
    got = torch.zeros((VOCABULARY,) * LONGEST, dtype=torch.float64)
    for verdict, p in outcomes(monkeypatch, verify, tree, laws):
        prefix = (*(int(tree.tokens[node]) for node in verdict.path), verdict.bonus)
        for rest in itertools.product(range(VOCABULARY), repeat=LONGEST - len(prefix)):
            text = (*prefix, *rest)
            got[text] += p * target.probability(text, len(prefix))
    texts = itertools.product(range(VOCABULARY), repeat=LONGEST)
    return max(abs(float(got[text]) - target.probability(text)) for text in texts)


def tree_of(n, seed):
    """A random tree of depth below LONGEST; siblings carry different tokens, but for one tree in four."""
    topology = random_tree(n, seed)
    while topology.depths.max() >= LONGEST or max(map(len, topology.children)) > VOCABULARY:
        seed += 1000
        topology = random_tree(n, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(n, dtype=torch.int64)
    for children in topology.children:
        tokens[list(children)] = torch.randperm(VOCABULARY, generator=generator)[: len(children)]
    if seed % 4 == 0:
        tokens = torch.randint(VOCABULARY, (n,), generator=generator)
    return DraftTree(topology, tokens)


CASES = [(n, seed) for n in (1, 2, 4, 7, 10) for seed in range(8)]


@pytest.mark.parametrize(("n", "seed"), CASES)
def test_match_has_the_law_of_plain_sampling(monkeypatch, n, seed):
    assert error_of(monkeypatch, match.verify, tree_of(n, seed), Target(seed)) < 1e-12


@pytest.mark.parametrize(("n", "seed"), CASES)
def test_a_path_goes_from_child_to_child(monkeypatch, n, seed):
    tree, target = tree_of(n, seed), Target(seed)
    laws = torch.stack([target.after(tree.path_to(node)) for node in range(n)])
    for verdict, _ in outcomes(monkeypatch, match.verify, tree, laws):
        assert list(tree.topology.parents[list(verdict.path)]) == [0, *verdict.path][: len(verdict.path)]
        # Whatever carries the bonus would have been accepted as well.
        last = verdict.path[-1] if verdict.path else 0
        assert verdict.bonus not in tree.tokens[list(tree.topology.children[last])].tolist()


def bonus_of_the_root(tree, target, generator):
    verdict = match.verify(tree, target, generator)
    return Verdict(verdict.path, match.draw(target[0], generator))


def bonus_drawn_again(tree, target, generator):
    """The rejected draw is thrown away, as if it had carried no news."""
    verdict = match.verify(tree, target, generator)
    return Verdict(verdict.path, match.draw(target[verdict.path[-1] if verdict.path else 0], generator))


def always_the_first_child(tree, target, generator):
    node, path = 0, []
    while tree.topology.children[node]:
        node = tree.topology.children[node][0]
        path.append(node)
    return Verdict(tuple(path), match.draw(target[node], generator))


def law_of_the_wrong_node(tree, target, generator):
    return match.verify(tree, target.roll(1, 0), generator)


@pytest.mark.parametrize("wrong", [bonus_of_the_root, bonus_drawn_again, always_the_first_child, law_of_the_wrong_node])
def test_the_enumeration_finds_a_wrong_rule(monkeypatch, wrong):
    tree = DraftTree(Topology(torch.tensor([-1, 0, 0, 1, 1, 3]).numpy()), torch.tensor([0, 1, 2, 0, 2, 1]))
    assert error_of(monkeypatch, match.verify, tree, Target(2)) < 1e-12
    assert error_of(monkeypatch, wrong, tree, Target(2)) > 1e-3


def test_at_temperature_zero_the_longest_right_path_is_taken():
    """Draws of one-hot laws decide nothing: the real `draw`, no script."""
    topology = Topology(torch.tensor([-1, 0, 0, 2, 3]).numpy())
    tree = DraftTree(topology, torch.tensor([0, 2, 1, 1, 0]))
    after = torch.tensor([1, 0, 1, 2, 2])
    target = torch.eye(VOCABULARY)[after]
    assert match.verify(tree, target, torch.Generator()) == Verdict((2, 3), 2)

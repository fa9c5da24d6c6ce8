"""Tiny languages and all trees drawn from them, to enumerate the distributions of verification."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.dynamic_builder import DynamicTreeBuilder
from offload_rt.speculate.protocols import VerificationRule
from offload_rt.speculate.residual import Decision, ResidualRule
from offload_rt.speculate.static_builder import StaticTreeBuilder
from offload_rt.speculate.tree_state import captured, select_tokens
from offload_rt.speculate.verify import coupled, match
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology, Verdict
from support.tiny import random_tree, sequence_of

VOCABULARY = 3
LONGEST = 4


class Language:
    """A random distribution after every text of up to LONGEST tokens, with impossible tokens."""

    def __init__(self, seed: int, p_impossible: float = 0.15) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._draft_probs = {}
        for n in range(LONGEST + 1):
            for text in itertools.product(range(VOCABULARY), repeat=n):
                probs = torch.rand(VOCABULARY, generator=generator, dtype=torch.float64)
                probs[torch.rand(VOCABULARY, generator=generator) < p_impossible] = 0
                probs[0] += not probs.sum()
                self._draft_probs[text] = probs / probs.sum()
        self._below: dict[tuple, Tensor] = {}

    def after(self, text) -> Tensor:
        return self._draft_probs[tuple(text)]

    def chance(self, text: tuple) -> float:
        """Return the probability of the first tokens of a text."""
        return float(np.prod([self.after(text[:i])[token] for i, token in enumerate(text)]))

    def below(self, text: tuple) -> Tensor:
        """(VOCABULARY,) * (LONGEST - len(text)): distributions after each next token."""
        if text not in self._below:
            after = [self.continuations((*text, token)) for token in range(VOCABULARY)]
            self._below[text] = torch.stack(after)
        return self._below[text]

    def continuations(self, text: tuple) -> Tensor:
        """(VOCABULARY,) * (LONGEST - len(text)): distribution of all tokens that follow."""
        if len(text) == LONGEST:
            return torch.ones((), dtype=torch.float64)
        return weighted(self.after(text), self.below(text))


def weighted(probs: Tensor, below: Tensor) -> Tensor:
    """Multiply the rows of `below` (VOCABULARY, ...) by the probabilities of their tokens."""
    return probs.view(-1, *[1] * (below.ndim - 1)) * below


class Blocks(Language):
    """A block drafter: a distribution depends on the number of tokens and on the known tokens.

    All tokens are known to the block of a row in whose path the first token is 0, up to the last
    such token.
    """

    def after(self, text) -> Tensor:
        n_known = len(text) - [*reversed(text), 0].index(0) if text else 0
        return super().after((*text[:n_known], *[0] * (len(text) - n_known)))


@dataclass(frozen=True)
class Recipe:
    """A shape whose nodes are sampled or deterministic, all fixed before any token is.

    is_sampled  (n,) bool; deterministic children carry the most probable tokens of the draft's
                distribution, in order
    """

    topology: Topology
    is_sampled: np.ndarray
    independent: bool = False

    def trees(self, draft: Language) -> Iterator[tuple[DraftTree, float]]:
        """Every tree it can become, with its probability."""
        return every_run(lambda draw: self.grow(lambda _, text: draft.after(text), draw))

    def grow(self, after: Callable[[int, list[int]], Tensor], draw: "Draw") -> DraftTree:
        """Draw a tree with distributions by nodes and their texts."""
        tree = DraftTree(self.topology, torch.zeros(len(self.topology), dtype=torch.int64))
        row_of = np.full(len(self.topology), -1)
        rows: list[Tensor] = []
        for node, children in enumerate(self.topology.children):
            given = [child for child in children if not self.is_sampled[child]]
            probs = after(node, tree.path_to(node))
            tree.tokens[given] = probs.argsort(descending=True, stable=True)[: len(given)]
            if len(given) == len(children):
                continue
            row_of[node] = len(rows)
            rows.append(probs)
            sampled = SampledNodes(self.is_sampled, torch.stack(rows), row_of, self.independent)
            tree = replace(tree, sampled=sampled)
            for child, probs in child_probs(tree, node):
                # Distributions are read one by one, so each excludes the tokens drawn before it.
                if probs is not None:
                    tree.tokens[child] = draw(enumerate(probs.tolist()))
        return tree


def child_probs(tree: DraftTree, node: int) -> Iterator[tuple[int, Tensor | None]]:
    """Each child with its distribution given the siblings before it, in verification order."""
    sampled = tree.sampled
    children = tree.topology.children[node]
    given = [child for child in children if not sampled.is_sampled[child]]
    free = torch.ones(sampled.draft_probs.shape[1], dtype=torch.float64)
    free[tree.tokens[given]] = 0
    for child in children:
        if sampled.is_sampled[child]:
            probs = sampled.draft_probs[sampled.row_of[node]].double() * free
            probs = probs if probs.sum() > 0 else free.clone()
            yield child, probs / probs.sum()
            if not sampled.independent:
                free[tree.tokens[child]] = 0
    yield from ((child, None) for child in given)


def grow_with(
    builder: StaticTreeBuilder | DynamicTreeBuilder,
    probs_after: Callable[[tuple[int, ...]], Tensor],
    guess: Callable[[], None] = lambda: None,
) -> None:
    """Grow a tree as a draft model does, by distributions (vocabulary,) after the paths of rows.

    guess  may add rows to the next pass
    """
    state = builder.state
    while len(state.tokens) > state.n_done:
        guess()
        paths = Topology(state._tree.parents[: len(state.tokens)]).paths(state.tokens)
        logits = torch.stack([probs_after(path).log().float() for path in paths[state.new_rows]])
        reduce = captured(builder)
        selected = select_tokens(builder, reduce(logits) if reduce else logits)
        state.computed()
        builder.extend(selected)


@cache
def random_case(
    seed: int, dtype: torch.dtype, vocabulary: int = 12
) -> tuple[DraftTree, Tensor, Tensor]:
    """A tree of 1 to 40 nodes, the target's distributions, and a number for each node."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 41))
    # Deterministic, sampled, mixed, independently sampled.
    is_sampled = rng.random(n) < (0, 1, 0.5, 1)[seed % 4]
    is_sampled[0] = False
    is_possible = rng.random((n, vocabulary)) < rng.choice([0.2, 0.8], (n, 1))
    draft = rng.random((n, vocabulary)) ** 3 * is_possible
    draft[:, 0] += draft.sum(-1) == 0
    draft /= draft.sum(-1, keepdims=True)
    noise = rng.dirichlet(np.full(vocabulary, 0.5), n)
    target = torch.from_numpy(0.6 * draft + 0.4 * noise).to(dtype)
    draft_probs = torch.from_numpy(draft).to(dtype)
    drawing = np.random.default_rng(seed)

    def draw(outcomes: Iterable[tuple[Any, float]]) -> Any:
        values, probs = zip(*outcomes, strict=True)
        return drawing.choice(values, p=probs)

    recipe = Recipe(random_tree(n, seed, reach=7), is_sampled, seed % 4 == 3)
    tree = recipe.grow(lambda node, _: draft_probs[node], draw)
    sampled = SampledNodes(is_sampled, draft_probs, np.arange(n), recipe.independent)
    return replace(tree, sampled=sampled), target, torch.from_numpy(rng.random(n))


Decide = Callable[[DraftTree, Tensor, Tensor], Decision]
Outcomes = Callable[[DraftTree, Tensor], Iterator[tuple[Decision, float]]]


def outcomes(rule: VerificationRule) -> Outcomes:
    """Enumerate all outcomes of a rule, by its acceptance or the probability of every `draw`."""
    return lambda tree, target: (
        decisions(rule.decide, tree, target)
        if isinstance(rule, ResidualRule) and tree.sampled is not None
        else scripted(rule.verify, tree, target)
    )


def decisions(decide: Decide, tree: DraftTree, target: Tensor) -> Iterator[tuple[Decision, float]]:
    """Yield all decisions of a rule with their probabilities, branching at every acceptance."""
    n = len(tree.topology)
    worlds: list[tuple[frozenset[int], frozenset[int], float]] = [(frozenset(), frozenset(), 1.0)]
    while worlds:
        rejected, accepted, p = worlds.pop()
        # 0 accepts a node that has any chance, 1 none.
        uniforms = torch.tensor([float(node in rejected) for node in range(n)], dtype=torch.float64)
        decision = decide(tree, target, uniforms)
        for node in tree.topology.path_to(decision.end):
            acceptance = decision.acceptance[node]
            if node in accepted or np.isnan(acceptance):
                continue
            if acceptance < 1:
                worlds.append((rejected | {node}, accepted, p * (1 - acceptance)))
            accepted = accepted | {node}
            p = p * acceptance
        yield decision, p


@cache
def _sequence() -> Sequence:
    """Its noise, computed once, has no influence on scripted verdicts."""
    return sequence_of(0)


class _Fork(Exception):
    """Raised at a draw that the script does not decide yet, with its outcomes."""


Draw = Callable[[Iterable[tuple[Any, float]]], Any]


def every_run(run: Callable[[Draw], Any]) -> Iterator[tuple[Any, float]]:
    """Yield the results of a function with their probabilities, for every outcome of its draws.

    run  receives a function that draws from outcomes with their probabilities
    """
    scripts: list[tuple[tuple, float]] = [((), 1.0)]
    while scripts:
        script, p = scripts.pop()
        left = list(script)

        def draw(outcomes: Iterable[tuple[Any, float]], left: list = left) -> Any:
            if not left:
                raise _Fork(outcomes)
            return left.pop(0)

        try:
            yield run(draw), p
        except _Fork as fork:
            scripts += [((*script, outcome), p * q) for outcome, q in fork.args[0] if q > 0]


def scripted(verify: Callable, tree: DraftTree, target: Tensor) -> Iterator[tuple[Decision, float]]:
    """As `decisions`, by running `verify` for every sequence of outcomes of `draw`."""

    def run(draw: Draw) -> Verdict:
        def token(probs: Tensor, *_: object) -> list[int]:
            return [draw(enumerate(probs.flatten().tolist()))]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(match, "draw", token)
            patch.setattr(coupled, "draw", lambda probs, _: torch.tensor(token(probs)))
            return verify(tree, target, _sequence())

    for verdict, p in every_run(run):
        bonus = torch.nn.functional.one_hot(torch.tensor(verdict.bonus), target.shape[1]).to(target)
        yield Decision((0, *verdict.path)[-1], bonus, np.full(len(tree.topology), np.nan)), p


def target_probs(target: Language, tree: DraftTree) -> Tensor:
    return torch.stack([target.after(path) for path in tree.paths()])


def distribution_under(
    outcomes: Outcomes, trees: Iterable[tuple[DraftTree, float]], target: Language
) -> tuple[Tensor, float]:
    """The distribution of the first LONGEST tokens, and the expected tokens."""
    probs = torch.zeros((VOCABULARY,) * LONGEST, dtype=torch.float64)
    expected = 0.0
    for tree, p_tree in trees:
        for decision, p in outcomes(tree, target_probs(target, tree)):
            path = tuple(tree.path_to(decision.end))
            expected += p_tree * p * (len(path) + 1)
            probs[path] += weighted(p_tree * p * decision.probs, target.below(path))
    return probs, expected


def recipe(parents: list[int], is_sampled: str, independent: bool = False) -> Recipe:
    """Letters of `is_sampled` below the root: s for sampled, d for deterministic."""
    letters = np.array([False, *(letter == "s" for letter in is_sampled)])
    return Recipe(Topology(np.array(parents)), letters, independent)


def random_recipe(seed: int) -> Recipe:
    """Of four to six nodes, each sampled or deterministic, without more children than tokens."""
    n = 4 + seed % 3
    is_sampled = np.random.default_rng(seed).random(n) < 0.6
    is_sampled[0] = False
    for i in itertools.count(seed, 1000):
        tree = random_tree(n, i)
        if tree.depths.max() <= 3 and max(map(len, tree.children)) <= VOCABULARY:
            return Recipe(tree, is_sampled)


RECIPES = {
    "root alone": recipe([-1], ""),
    "chain": recipe([-1, 0, 1, 2], "sss"),
    "given": recipe([-1, 0, 0, 1, 1, 2, 3, 3], "ddddddd"),
    "siblings": recipe([-1, 0, 0], "ss"),
    "without replacement": recipe([-1, 0, 0, 1, 1, 3], "sssss"),
    "larger second child": recipe([-1, 0, 0, 2, 2, 4], "sssss"),
    "all tokens drawn": recipe([-1, 0, 0, 0, 2, 2], "sssss"),
    "independent": recipe([-1, 0, 0, 1, 2], "ssss", independent=True),
    "three independent": recipe([-1, 0, 0, 0, 1], "ssss", independent=True),
    "hybrid": recipe([-1, 0, 0, 1, 1, 2, 2], "dssdds"),
    "hybrid of all tokens": recipe([-1, 0, 0, 0, 1, 2, 3], "dsdsss"),
    "distribution that runs out": recipe([-1, 0, 0, 0, 1, 1], "sssss"),
    "distribution that runs out on deterministic": recipe([-1, 0, 0, 0, 1, 1], "dssds"),
    "blocks": recipe([-1, 0, 0, 1, 1, 3], "sssss"),
    "draft is target": recipe([-1, 0, 0, 1, 1, 3], "ssdss"),
    **{f"random {seed}": random_recipe(seed) for seed in range(6)},
}


def languages(name: str) -> tuple[Language, Language]:
    seed = 10 * list(RECIPES).index(name)
    target = Language(seed)
    if name == "draft is target":
        return target, target
    if "blocks" in name:
        return target, Blocks(seed + 1)
    return target, Language(seed + 1, p_impossible=0.7 if "runs out" in name else 0.15)

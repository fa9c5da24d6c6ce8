"""Exactness of verification by enumeration, with wrong versions; see docs/exactness.md."""

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from support.languages import (
    RECIPES,
    Language,
    Outcomes,
    child_probs,
    distribution_under,
    languages,
    outcomes,
    random_case,
    target_probs,
)
from support.tiny import assert_drawn, sequence_of
from torch import Tensor

from offload_rt import SamplingParams
from offload_rt.executor.sequence import Sequence
from offload_rt.ops import reference
from offload_rt.speculate.residual import ResidualRule
from offload_rt.speculate.select import load_rule
from offload_rt.system import registry
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology

# "adaptive" hands over to two of these.
RULES = [name for name in registry.names("speculate.verify") if name != "adaptive"]
RESIDUAL = tuple(name for name in RULES if isinstance(load_rule(name), ResidualRule))


def compare(outcomes, trees, target):
    """The largest error of the first tokens' distribution, and the expected tokens of a pass."""
    probs, expected = distribution_under(outcomes, trees, target)
    return float((probs - target.continuations(())).abs().max()), expected


@cache
def result(rule, name):
    target, draft = languages(name)
    return compare(outcomes(load_rule(rule)), RECIPES[name].trees(draft), target)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("rule", RULES)
def test_output_distribution_equals_plain_sampling(rule, name):
    assert result(rule, name)[0] < 1e-12


def block_verification(target: Tensor, draft: Tensor, tokens: list[int]) -> float:
    """Tokens expected of a chain (Sun et al. 2025, algorithm 2), by the rows after its nodes.

    Every prefix is tried; the longest accepted prefix counts.
    """
    p = 1.0
    expected = 1.0
    for i, token in enumerate(tokens):
        p = min(1.0, p * float(target[i][token] / draft[i][token]))
        accepted = p
        if i + 1 < len(tokens):
            left = float((p * target[i + 1] - draft[i + 1]).clamp_min(0).sum())
            accepted = left / (left + 1 - p) if left > 0 else 0.0
        expected = (1 - accepted) * expected + accepted * (i + 2)
    return expected


def test_bottom_up_on_a_chain_is_block_verification():
    target, draft = languages("chain")
    expected = 0.0
    for tree, p in RECIPES["chain"].trees(draft):
        draft_rows = target_probs(draft, tree)
        expected += p * block_verification(target_probs(target, tree), draft_rows, tree.path_to(3))
    assert abs(result("traversal", "chain")[1] - expected) < 1e-12


@pytest.mark.parametrize("rule", ["match", "coupled"])
@pytest.mark.parametrize("name", ["given", "independent", "three independent", "random 1"])
def test_path_continues_while_a_child_has_the_token(rule, name):
    """Of siblings with the same token, whichever of them has the child."""
    target, draft = languages(name)
    expected = sum(
        p * sum(target.chance(path) for path in {*tree.paths()})
        for tree, p in RECIPES[name].trees(draft)
    )
    assert abs(result(rule, name)[1] - expected) < 1e-12


# Rules that are wrong on purpose.


def bonus_of_the_target(rule) -> Outcomes:
    """The bonus is drawn from the target's distribution, as if a rejection carried no news."""
    return lambda tree, target: (
        (replace(decision, probs=target[decision.end]), p)
        for decision, p in outcomes(rule)(tree, target)
    )


def probs_of_the_wrong_node(rule) -> Outcomes:
    return lambda tree, target: outcomes(rule)(tree, target.roll(1, 0))


@pytest.mark.parametrize("rule", [*RESIDUAL, "match"])
@pytest.mark.parametrize("name", ["siblings", "without replacement", "hybrid"])
@pytest.mark.parametrize("wrong", [bonus_of_the_target, probs_of_the_wrong_node])
def test_enumeration_detects_a_wrong_rule(rule, name, wrong):
    # Without impossible tokens, so that every fault can occur.
    target, draft = (Language(seed, p_impossible=0.0) for seed in (1, 2))
    assert compare(wrong(load_rule(rule)), RECIPES[name].trees(draft), target)[0] > 1e-3


def struck(probs: Tensor, child_sampling: Tensor | None, token: int) -> Tensor:
    if child_sampling is not None:
        return (probs - child_sampling).clamp_min(0)
    probs = probs.clone()
    probs[token] = 0
    return probs


def plain_top_down(tree: DraftTree, target: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
    """Token by token, as the papers have it."""
    node = 0
    p = target[0].double()
    while True:
        for child, probs in child_probs(tree, node):
            token = int(tree.tokens[child])
            if uniforms[child] < p[token] / (1 if probs is None else probs[token]):
                node = child
                p = target[child].double()
                break
            p = struck(p, probs, token)
            p = p / p.sum() if p.sum() > 0 else target[node].double()
        else:
            return node, p


def plain_bottom_up(tree: DraftTree, target: Tensor, uniforms: Tensor) -> tuple[int, Tensor]:
    """Leaf to root, as a recursion."""

    def visit(node: int, a: float) -> tuple[int, Tensor] | None:
        b = target[node].double()
        for child, probs in child_probs(tree, node):
            token = int(tree.tokens[child])
            share = float(a * b[token] / (1 if probs is None else probs[token]))
            result = visit(child, min(1.0, share))
            if result is not None:
                return result
            left = struck(a * b, probs, token)
            total = float(left.sum())
            b = left / total if total > 0 else target[node].double()
            a = total / (total + (1 - a)) if total > 0 else float(node == 0)
        return (node, b) if node == 0 or uniforms[node] < a else None

    return visit(0, 1.0)


PLAIN = {"sequoia": plain_top_down, "traversal": plain_bottom_up}


@pytest.mark.parametrize(("dtype", "vocabulary", "n_cases", "rtol", "atol"), [
    (torch.float64, 12, 60, 0, 1e-12), (torch.float32, 12, 60, 0, 1e-5),
    (torch.float32, 32_000, 8, 1e-3, 1e-6),
])  # fmt: skip
@pytest.mark.parametrize("rule", PLAIN)
def test_kernel_decides_like_the_plain_rule(rule, dtype, vocabulary, n_cases, rtol, atol):
    ends = set()
    for seed in range(n_cases):
        tree, target, uniforms = random_case(seed, dtype, vocabulary)
        # Numbers close to 1 reject everything, which is the longest way through the residuals.
        for numbers in (uniforms, torch.full_like(uniforms, 0.999999)):
            decision = load_rule(rule).decide(tree, target, numbers)
            end, probs = PLAIN[rule](tree, target, numbers)
            assert decision.end == end, seed
            assert decision.probs.dtype == dtype and bool((decision.probs >= 0).all())
            torch.testing.assert_close(decision.probs.double(), probs, rtol=rtol, atol=atol)
            ends.add(int(tree.topology.depths[end]))
    assert ends >= {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
def test_verdict_is_an_allowed_path_and_follows_from_the_seed(rule):
    module = load_rule(rule)
    for seed in range(24):
        tree, target, _ = random_case(seed, torch.float32, (12, 12, 32_000)[seed % 3])
        given = target, tree.tokens, tree.sampled.draft_probs
        before = [part.clone() for part in given]
        verdicts = [module.verify(tree, target, sequence_of(seed)) for _ in range(2)]
        assert verdicts[0] == verdicts[1], "all chance comes from the sequence"
        bonus = verdicts[0].bonus
        nodes = [0, *verdicts[0].path]
        assert type(bonus) is int and tree.topology.parents[nodes[1:]].tolist() == nodes[:-1]
        # The target allows all tokens.
        assert (target[nodes, [*tree.tokens[nodes[1:]].tolist(), bonus]] > 0).all()
        assert all(map(torch.equal, before, given)), "a rule changes nothing"


@pytest.mark.parametrize("temperature", [0.0, 0.1, 0.8, 0.9])
def test_adaptive_rule_depends_on_the_temperature(temperature):
    sampling = SamplingParams(temperature=temperature, seed=5)
    chosen = "coupled" if temperature in (0.1, 0.8) else "traversal"
    rules = load_rule("adaptive"), load_rule(chosen)
    for seed in range(8):
        tree, target, _ = random_case(seed, torch.float32)
        verdicts = [each.verify(tree, target, Sequence([1], sampling, 64)) for each in rules]
        assert verdicts[0] == verdicts[1]


@pytest.mark.parametrize("rule", RULES)
def test_consecutive_verdicts_are_independent(rule):
    module = load_rule(rule)
    target, draft = languages("hybrid")
    tree = next(iter(RECIPES["hybrid"].trees(draft)))[0]
    draft_probs = target_probs(target, tree)
    acceptance: Counter[tuple[int, int]] = Counter()
    for decision, p in outcomes(module)(tree, draft_probs):
        for bonus, p_bonus in enumerate(decision.probs.tolist()):
            acceptance[decision.end, bonus] += p * p_bonus
    sequence = sequence_of(3)
    drawn = []
    for _ in range(3000):
        verdict = module.verify(tree, draft_probs, sequence)
        end = (0, *verdict.path)[-1]
        drawn.append((end, verdict.bonus))
        sequence.tokens += [*tree.path_to(end), verdict.bonus]
    both = itertools.product(acceptance.items(), repeat=2)
    pairs = {(first, then): p * q for (first, p), (then, q) in both}
    assert_drawn(zip(drawn[::2], drawn[1::2], strict=True), pairs)


@pytest.mark.parametrize("rule", RESIDUAL)
@pytest.mark.parametrize(("draft", "target", "uniform", "expected"), [
    # Subtraction from a sum of one would leave only its rounding.
    ([0.6, 0.4, 3e-9, 1e-9, 0.0], [0.1, 0.1, 0.1, 0.4, 0.3], 0.99, None),
    # Subnormal residuals yield the uniform fallback without overflow.
    ([1.0, 1e-40, 0.0, 0.0], [0.4, 0.1, 0.3, 0.2], 0.999, [0.0, 0.0, 1.0, 0.0]),
    # The largest noise rejects both deterministic children, with all the probability.
    (None, [0.6145196, 0.38548037, 0.0], 1 - 2**-53, [0.6145196, 0.38548037, 0.0]),
])  # fmt: skip
def test_residuals_of_extreme_distributions(rule, draft, target, uniform, expected):
    n = 4 if expected is None else 3
    is_sampled = (np.arange(n) > 0) & (draft is not None)
    sampled = SampledNodes(is_sampled, torch.tensor([draft or target]), (-np.arange(n)).clip(-1))
    tree = DraftTree(Topology.star(n), torch.tensor([0, *range(n - 1)]), sampled)
    targets = torch.tensor([target] * n)
    uniforms = torch.full((n,), uniform, dtype=torch.float64)
    decision = load_rule(rule).decide(tree, targets, uniforms)
    probs = torch.tensor(expected or []).double()
    if expected is None:
        end, probs = PLAIN.get(rule, plain_top_down)(tree, targets, uniforms)
        assert decision.end == end == 0
    torch.testing.assert_close(decision.probs.double(), probs, rtol=0, atol=1e-6)


def test_draft_distribution_has_no_subnormal_numbers():
    probs = reference.probs_of(torch.tensor([[0.0, -92.0, -80.0, -200.0]]), 1.0)
    assert torch.softmax(torch.tensor([0.0, -92.0]), 0)[1] > 0
    assert probs[0, 1] == probs[0, 3] == 0 < probs[0, 2]

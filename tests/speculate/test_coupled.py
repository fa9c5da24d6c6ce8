"""Coupled sampling: noise, draws, and texts as a function of prompt, model and seed."""

import itertools
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny import DRAFTERS, logits_of, open_llm, pause_often, prompt_of

from offload_rt import SamplingParams
from offload_rt.executor.sequence import Sequence
from offload_rt.ops import noise
from offload_rt.ops.noise import NoiseRows, exponentials, philox
from offload_rt.sampling import Context, NodeProbs
from offload_rt.speculate import tree_state
from offload_rt.speculate.select import drafter_type
from offload_rt.speculate.verify import coupled

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")

# Of Random123's kat_vectors: counter, key, result.
KNOWN = """
00000000 00000000 00000000 00000000  00000000 00000000  6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff  ffffffff ffffffff  408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344  a4093822 299f31d0  d16cfe09 94fdcceb 5001e420 24126ea1
"""


@pytest.mark.parametrize("line", KNOWN.strip().splitlines())
def test_philox_equals_the_published_words(line):
    words = [int(word, 16) for word in line.split()]
    several = torch.tensor(words[:4]).view(4, 1, 1).expand(4, 2, 3)
    assert philox(several, tuple(words[4:6]))[:, 1, 2].tolist() == words[6:]


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1, 2**64 - 1])
def test_noise_depends_on_seed_position_and_token(monkeypatch, seed):
    """However many positions and tokens are made together."""
    monkeypatch.setattr(noise, "_N_VALUES", 25)  # two rows at a time
    rows = exponentials(seed, 40, 5, 11, CPU)
    assert rows.dtype == torch.float32 and rows.shape == (5, 11)
    for position, token in itertools.product(range(5), range(11)):
        counter = torch.tensor([[token // 4], [40 + position], [0], [0]])
        words = philox(counter, (seed % 2**32, seed >> 32))
        expected = -math.log((int(words[token % 4, 0]) + 0.5) / 2**32)
        assert abs(float(rows[position, token]) - expected) < 1e-7 * expected
    assert torch.equal(exponentials(seed, 42, 1, 11, CPU), rows[2:3])
    assert torch.equal(exponentials(seed, 40, 5, 6, CPU), rows[:, :6])


def test_logarithm_is_exact_over_the_whole_range():
    first = torch.arange(5000)
    words = torch.cat([first, torch.randint(2**32, (5000,)), 2**32 - 1 - first])
    x = (words.double() + 0.5) / 2**32
    result = noise._minus_log(x)
    assert torch.equal(result.float(), -torch.where(x > 0.5, torch.log1p(x - 1), x.log()).float())
    assert 0 < float(result.min()) < 2**-32 and float(result.max()) < 23


def test_noise_rows_are_generated_once_and_released(monkeypatch):
    monkeypatch.setattr(noise, "exponentials", made := Mock(wraps=exponentials))
    monkeypatch.setattr(noise, "_N_AHEAD", 3)
    rows = NoiseRows(5)
    for first, n in ((10, 6), (10, 2), (13, 5), (16, 1), (40, 3), (41, 4)):
        assert torch.equal(rows.at(first, n, 9, CPU), exponentials(5, first, n, 9, CPU))
    assert [call.args[2] for call in made.call_args_list] == [6, 3, 3, 3]
    for first, n in ((41, 4), (39, 2)):
        assert torch.equal(rows.at(first, n, 7, CPU), exponentials(5, first, n, 7, CPU))


@pytest.mark.parametrize("p", [[0.7, 0.3], [0.02, 0.98], [0.5, 0.1, 0.4], [0.25, 0.0, 0.75]])
def test_share_of_noise_that_draws_a_token_is_its_probability(p):
    """Integrate over a grid of the unit cube, at the midpoints of its cells."""
    n = 150 if len(p) == 2 else 26
    cells = noise._minus_log((torch.arange(n).double() + 0.5) / n).float()
    counts = np.zeros(len(p))
    for place in itertools.product(range(n), repeat=len(p)):
        counts[coupled.draw(torch.tensor([p]), cells[list(place)][None])] += 1
    assert np.abs(counts / counts.sum() - p).max() < 0.8 / n
    assert all(count == 0 for count, chance in zip(counts, p, strict=True) if chance == 0)


def test_impossible_tokens_are_never_drawn():
    """Including denormal probabilities; at temperature 0 only the most probable token is drawn."""
    tiny = torch.tensor([0.0, 1e-45, 1.0, 0.0])
    largest = float(noise._minus_log(torch.tensor([2.0**-33]).double()))
    for numbers in ([largest] * 4, [2.0**-33, largest, largest, 2.0**-33]):
        for probs in (tiny[None], tiny[None].double()):
            assert coupled.draw(probs, torch.tensor(numbers)) == 2


ENDS = (*range(0, 128, 4),)
PARAMS = (
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.9, "min_tokens": 9, "stop_token_ids": ENDS},
    {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": -0.3},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {5: 3.0}},
)
PROMPTS = [prompt_of(seed, n) for seed, n in enumerate((9, 1, 30))] + [[5, 1, 2, 3, 4] * 5]
N_NEW = 20


def params_of(seed):
    return [SamplingParams(N_NEW, seed=seed + i, **more) for i, more in enumerate(PARAMS)]


@pytest.fixture(scope="module")
def plain_texts(pair):
    """By seed, each decoded alone and without trees."""
    with open_llm(pair.target, max_model_len=64, rule="coupled") as llm:
        texts = {}
        for seed in (1, 900):
            several = zip(PROMPTS, params_of(seed), strict=True)
            texts[seed] = [llm.generate(*each)[0].token_ids for each in several]
    return texts


def test_plain_decoding_draws_by_the_noise(pair, plain_texts):
    for prompt, params, text in zip(PROMPTS, params_of(1), plain_texts[1], strict=True):
        tokens = list(prompt)
        for _ in text:
            logits = logits_of(pair.model, tokens)[-1:]
            context = Context(tokens, len(prompt), {*params.stop_token_ids})
            target = NodeProbs(logits, params, context, [[]])[:][0]
            row = exponentials(params.seed, len(tokens), 1, len(target), CPU)[0]
            tokens.append(int((target.log() - row.log()).argmax()))
        assert tokens[len(prompt) :] == text
    others = [text == other for text, other in zip(*plain_texts.values(), strict=True)]
    assert others == [False, False, False, True]


SIZES = [*((name, 24) for name in DRAFTERS), ("recycle", 3), ("static_tree", 3)]


@pytest.mark.parametrize("pauses", [False, True])
@pytest.mark.parametrize(("drafter", "tree_size"), SIZES)
def test_texts_equal_plain_decoding_with_any_drafter(
    pair, plain_texts, monkeypatch, drafter, tree_size, pauses
):
    """Token for token; together and alone."""
    if pauses:
        pause_often(monkeypatch)
    settings = {"max_model_len": 64, "tree_size": tree_size, **pair.settings(drafter, "coupled")}
    with open_llm(pair.target, **settings) as llm:
        outputs = llm.generate(PROMPTS, params_of(1))
        assert [output.token_ids for output in outputs] == plain_texts[1]
        assert llm.generate(PROMPTS[0], params_of(900)[0])[0].token_ids == plain_texts[900][0]
        has_room = drafter_type(drafter).resources.view is None  # for drafts of all sequences
        if tree_size == 24 and "draft_model" in settings and has_room and not pauses:
            assert all(output.stats.n_passes < N_NEW for output in outputs), "nothing was accepted"


@pytest.mark.parametrize("n_at_once", [1, 2, 5])
def test_noise_of_some_rows_at_once_is_that_of_their_levels(n_at_once, monkeypatch):
    monkeypatch.setattr(tree_state, "changed_rows", lambda _: n_at_once)
    sequence = Sequence([1, 2, 3], SamplingParams(4), 16)
    state = tree_state.TreeState(5, 8, sequence, torch.device("cpu"))
    for parents in ([0, 0], [1], [3]):
        state.add(parents, [4] * len(parents))
    state.noise, logits = torch.randn(4, 5), torch.randn(5, 5)
    builder = SimpleNamespace(state=state, reduce=torch.clone, select=torch.clone)
    changed = tree_state.select_tokens(builder, logits)
    torch.testing.assert_close(changed, (state.noise[[0, 1, 1, 2, 3]] + logits) / 0.75)


@pytest.mark.parametrize("drafter", ["static_tree", "dynamic_tree"])
def test_draft_equal_to_the_target_predicts_the_draws(twin, steady, drafter):
    settings = {"draft_model": str(twin.draft), "drafter": drafter, "rule": "coupled"}
    params = [SamplingParams(61, temperature, seed=7) for temperature in (0.5, 1.4)]
    with open_llm(twin.target, tree_size=40, tree_depth=5, **settings) as llm:
        outputs = llm.generate([[1, 2, 3], [4]], params)
    assert [output.stats.n_passes for output in outputs] == [1 + 60 // 5] * 2

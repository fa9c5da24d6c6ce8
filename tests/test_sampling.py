"""From logits to a distribution, against transformers' processors; and draws."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fake_gpu import fake_gpu
from support.texts import processors
from support.tiny import assert_drawn

from offload_rt import SamplingParams, sampling
from offload_rt.bad_words import BadWords
from offload_rt.errors import NumericsError
from offload_rt.executor.sequence import Sequence
from offload_rt.sampling import Context, NodeProbs, draw, token_logprobs

pytestmark = pytest.mark.numeric

VOCABULARY = 60
SETTINGS = [
    {"temperature": 0.35}, {"temperature": 2.5},
    *({"temperature": 1.0} | more for more in (
        {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 1000}, {"top_p": 0.8}, {"top_p": 1e-6},
        {"min_p": 0.1}, {"min_p": 1.0}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.6},
        {"presence_penalty": 1.1}, {"frequency_penalty": -0.6},
        {"logit_bias": {3: 4.0, 7: -100.0, 40: -torch.inf}},
        {"allowed_token_ids": (3, 9, 40, 41)},
        {"bad_words_ids": ((5,), (7, 8), (7, 9), (1, 2, 3))})),
    {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.4, "frequency_penalty": 0.5,
        "logit_bias": {9: 5.0}, "repetition_penalty": 1.3},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.4, "top_p": 0.85, "min_p": 0.05},
    {"temperature": 1.4, "top_k": 12, "min_p": 0.2},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.3},
]  # fmt: skip


def random_logits(seed, n=16, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    contexts = torch.randint(VOCABULARY, (n, 25), generator=generator).tolist()
    return torch.randn(n, VOCABULARY, generator=generator) * scale, contexts


def of_settings(logits, settings, contexts=()):
    """Nodes whose bad words begin with the answer."""
    context = Context(bad_words=BadWords(settings.get("bad_words_ids", ())))
    return NodeProbs(logits, SamplingParams(**settings), context, contexts)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_probabilities_equal_transformers(settings, seed):
    logits, contexts = random_logits(seed, n=70)
    contexts[3] = []
    before = logits.clone()
    nodes = of_settings(logits, settings, contexts)
    got = nodes[:]
    for rows in (slice(0, 1), slice(3, 4), slice(60, 69), slice(69, 70)):
        assert torch.equal(nodes[rows], got[rows]), "nodes are independent"
    chain = processors(SamplingParams(**settings))
    pairs = zip(contexts, before, strict=True)
    scores = torch.cat([chain(torch.tensor([context]), row[None]) for context, row in pairs])
    expected = torch.softmax(scores, -1)
    assert torch.equal(got > 0, expected > 0), "the filters keep other tokens"
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(logits, before), "the model's logits were changed"


token_lists = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(token_lists.filter(bool), max_size=8), token_lists, st.lists(token_lists))
def test_ends_of_bad_words_equal_brute_force(words, answer, paths):
    sequence = Sequence([0], SamplingParams(max_tokens=99), 99, bad_words=BadWords(words))
    sequence.extend(answer)
    position = sequence.bad_words
    ends = {
        (row, word[-1])
        for row, path in enumerate(paths)
        for word in words
        if len(word) > 1 and (answer + path)[-len(word) + 1 :] == word[:-1]
    }
    assert set(position.ends(paths)) == ends
    assert position.singles == [word[0] for word in words if len(word) == 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 3, -1])
def test_logprobs_have_ranks_of_the_raw_distribution(dtype, k):
    logits = random_logits(8, n=70)[0].to(dtype)
    chosen = (torch.arange(70) % VOCABULARY).tolist()
    logprobs = token_logprobs(logits, chosen, k, "<{}>".format)
    rows = torch.log_softmax(logits.double(), -1)
    for by_id, token, row in zip(logprobs, chosen, rows, strict=True):
        best = row.sort(descending=True).values[: VOCABULARY if k < 0 else k].tolist()
        assert next(iter(by_id)) == token and len(by_id) in (len(best), len(best) + 1)
        assert by_id[token].decoded_token == f"<{token}>"
        for id, (logprob, rank, _) in by_id.items():
            assert abs(logprob - float(row[id])) < 1e-5
            assert rank == 1 + int((row > row[id]).sum()) or float((row == row[id]).sum()) > 1
        others = [by_id[id].logprob for id in by_id if by_id[id].rank <= len(best)]
        assert sorted(others, reverse=True)[: len(best)] == pytest.approx(best, abs=1e-5)


# Top-p orders a row's first tokens, and all of a row only where these do not reach it.


def plain_top_p(logits, temperature, top_p, top_k):
    """The distribution by sorting each whole row, ties in the order of their ids."""
    probs = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
    probs = probs * (probs >= probs.topk(top_k).values[:, -1:])
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered.double()
    stays = before < top_p * probs.sum(-1, keepdim=True, dtype=torch.float64)
    probs = probs * torch.zeros_like(stays).scatter(-1, order, stays)
    return probs / probs.sum(-1, keepdim=True)


def rows_of_all_kinds(seed, n_tokens):
    """Smooth, coarse, flat and nearly flat rows, and a row with one possible token."""
    noise = torch.randn(10, n_tokens, generator=torch.Generator().manual_seed(seed))
    special = torch.zeros(3, n_tokens)
    special[1, n_tokens // 2] = 3.0
    special[2, :-1] = -torch.inf
    return torch.cat((3 * noise[:4], 12 * noise[4:6], (2 * noise[6:]).round(), special))


@given(
    st.sampled_from([30, 511, 512, 513, 1700]),
    st.sampled_from([1e-9, 1e-3, 0.25, 0.5, 0.9, 0.99, 1 - 1e-6, 1 - 1e-12])
    | st.floats(1e-6, 1 - 1e-6),
    st.sampled_from([0.05, 0.3, 0.7, 1.0, 2.0, 50.0]), st.sampled_from([1, 40, 600, 10**6]),
    st.integers(0, 10**6),
)  # fmt: skip
def test_top_p_equals_a_full_sort(n_tokens, top_p, temperature, top_k, seed):
    logits = rows_of_all_kinds(seed, n_tokens)
    got = of_settings(logits, {"temperature": temperature, "top_p": top_p, "top_k": top_k})[:]
    assert torch.equal(got, plain_top_p(logits, temperature, top_p, min(top_k, n_tokens)))


@pytest.mark.parametrize("penalty", [1.0, 2.0])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_few_tokens_of_peaked_rows_are_sorted(monkeypatch, device, penalty):
    """Each row with its own path, where a penalty looks back on it. A GPU sorts rows together."""
    sort = sampling._descending
    ordered = []
    monkeypatch.setattr(
        sampling, "_descending", lambda rows: ordered.append(tuple(rows.shape)) or sort(rows)
    )
    logits = 6 * torch.randn(150, 2000, generator=torch.Generator().manual_seed(0))
    flat = [3, 70, 149]
    logits[flat] = 1.0
    paths = [[row, row + 1] for row in range(150)]
    settings = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": penalty}
    with fake_gpu(monkeypatch) if device == "cuda" else nullcontext():
        node_probs = of_settings(logits.to(device), settings, paths)
        got = node_probs[:].cpu()
        n_ordered = len(ordered)
        assert torch.equal(node_probs[40:130].cpu(), got[40:130])
    del ordered[n_ordered:]
    if device == "cuda":
        assert ordered == [(len(flat), 2000)]
    else:
        assert [row for row, (_, n) in enumerate(ordered) if n > 1000] == flat
    looked_back = logits.clone()
    for row, path in zip(looked_back, paths, strict=True):
        row[path] = torch.where(row[path] > 0, row[path] / penalty, row[path] * penalty)
    assert torch.equal(got, plain_top_p(looked_back, 0.8, 0.9, 2000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
def test_best_token_has_the_largest_changed_logit(settings, dtype):
    """Of equal logits, the first; whatever the filters."""
    logits, contexts = random_logits(1, n=70)
    logits = (2 * logits).round().to(dtype)  # with many ties
    settings = {**settings, "temperature": 0.0}
    nodes = of_settings(logits, settings, contexts)
    got = nodes.best(slice(None))
    assert nodes.best(slice(3, 4)) + nodes.best(slice(4, 70)) == got[3:]
    chain = processors(SamplingParams(**settings))
    wide = logits.to(torch.promote_types(dtype, torch.float32))
    for token, row, path in zip(got, wide, contexts, strict=True):
        changed = chain(torch.tensor([path]), row[None])[0].tolist()
        assert token == changed.index(max(changed))


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_row_without_numbers_or_possible_tokens_raises_where_read(wrong):
    logits, contexts = random_logits(0)
    logits[5, slice(None) if wrong < 0 else 17] = wrong
    nodes = of_settings(logits, {"temperature": 0.8}, contexts)
    for read in (NodeProbs.best, NodeProbs.__getitem__):
        read(nodes, slice(0, 5))
        with pytest.raises(NumericsError):
            read(nodes, slice(5, 6))


@pytest.mark.parametrize("probs", [
    [0.25, 0.25, 0.25, 0.25], [0.0, 0.7, 0.0, 0.1, 0.2, 0.0], [0.5, 0.0, 0.0, 0.0, 0.5],
    [0.9, 0.05, 0.03, 0.02], [0.0, 0.0, 1.0],
])  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 0.9])
def test_draws_follow_the_distribution(probs, scale):
    """Only proportions count, since rounding changes the sum; a draw takes one random number."""
    rows = (torch.tensor(probs) * scale).expand(10_000, -1)
    generators = [torch.Generator().manual_seed(11) for _ in range(2)]
    assert_drawn(draw(rows, generators[0]), dict(enumerate(probs)))
    draw(torch.ones(10_000, 9), generators[1])
    assert torch.equal(*(generator.get_state() for generator in generators))


@pytest.mark.parametrize(("at", "token"), [(0.0, 2), (1 - 2**-53, 5), (1.0, 5)])
def test_ends_of_the_unit_interval_give_possible_tokens(monkeypatch, at, token):
    """Including a draw of exactly one, a possible result of rounding."""
    drawn = torch.full((1,), at, dtype=torch.float64)
    monkeypatch.setattr(sampling.torch, "rand", lambda *_, **__: drawn)
    probs = torch.tensor([0.0, 0.0, 0.3, 0.2, 0.0, 0.5, 0.0])
    assert draw(probs[None], torch.Generator()) == [token]

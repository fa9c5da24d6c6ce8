"""Predictions of the target, recycled and from a file: their table, and trees from them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import Steady, engine_of, generate, logits_of, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.engine.engine import Engine
from offload_rt.errors import SettingsError
from offload_rt.executor import runner
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate import recycler
from offload_rt.speculate.ngrams import copied_paths, find_matches
from offload_rt.speculate.pair_stats import PairStats
from offload_rt.speculate.predictions import (
    N_STORED,
    PREDICTIONS_FILE,
    StoredPredictions,
    write_predictions,
)
from offload_rt.speculate.protocols import DraftParts
from offload_rt.speculate.recycler import PredictionTable, Recycler, TextCandidates
from offload_rt.speculate.select import drafter_type
from offload_rt.speculate.text_drafter import TextDrafter
from offload_rt.tree.topology import Verdict

N_NODES = 24
PARTS = DraftParts(DraftLimits(N_NODES, 6), Steady(), "without_replacement")
few_tokens = st.integers(0, 2)
contexts = st.lists(few_tokens, min_size=1, max_size=3).map(tuple)
predictions = st.lists(
    st.tuples(contexts, st.permutations(range(4)), st.integers(1, 4)), max_size=20
)


def found(table, context):
    """Return the predicted tokens after a context, with their probabilities."""
    prediction = table.find(context)
    return dict(zip(prediction.tokens, prediction.probs, strict=True)) if prediction else {}


@given(predictions, contexts, st.integers(1, 60))
def test_table_finds_the_newest_prediction_of_the_longest_context(several, context, n_most):
    """Of the newest keys. After unknown tokens, the mean of all predictions."""
    table = PredictionTable(n_most)
    wanted = {}  # by key, latest last
    mean = Counter()
    for before, tokens, n in several:
        prediction = {token: 0.5**k for k, token in enumerate(tokens[:n], 1)}
        table.keep(before, [*prediction], [*prediction.values()])
        mean.update({token: p / len(several) for token, p in prediction.items()})
        for k in range(len(before)):
            wanted.pop(before[k:], None)
            wanted[before[k:]] = prediction
    wanted = dict([*wanted.items()][-n_most:])
    assert len(table._after) == len(wanted)
    keys = [context[k:] for k in range(len(context)) if context[k:] in wanted]
    assert found(table, context) == pytest.approx(wanted[keys[0]] if keys else dict(mean))


@pytest.mark.parametrize("n_levels", [2, 4])
def test_candidates_have_the_higher_chance_of_prediction_and_copy(n_levels):
    random = np.random.default_rng(0)
    n_both = 0
    for _ in range(20):
        stored = Recycler(PairStats())
        for _ in range(30):
            context = tuple(random.integers(4, size=3).tolist())
            stored.table.keep(context, random.permutation(4)[:3].tolist(), [0.5, 0.3, 0.1])
        sequence = Sequence(random.integers(4, size=20).tolist(), SamplingParams(), 99)
        copied = copied_paths(find_matches(sequence, n_levels - 1), stored.rates)
        assert copied and max(map(len, copied)) == n_levels - 1
        paths = [(), *copied, (3, 3, 3)]
        wanted = {}
        for i, path in enumerate(paths):
            context = (*sequence.tokens, *path)[-3:]
            prior = recycler._PRIOR[stored.table.find(context).kind]
            wanted |= {(i, token): prior * p for token, p in found(stored.table, context).items()}
        for path, chance in copied.items():
            key = paths.index(path[:-1]), path[-1]
            n_both += key in wanted
            ratio = chance / copied.get(path[:-1], 1.0)
            wanted[key] = max(wanted.get(key, 0.0), ratio)
        rows, tokens, chances = TextCandidates(stored, sequence, n_levels).below(paths)
        keys = list(zip(rows.tolist(), tokens.tolist(), strict=True))
        assert len(set(keys)) == len(keys)
        assert dict(zip(keys, chances, strict=True)) == pytest.approx(wanted)
    assert n_both > 20


@pytest.fixture(scope="module")
def llm(zoo):
    with open_llm(zoo.pair("llama", 0).target, max_model_len=128) as llm:
        yield llm


@pytest.mark.parametrize("n_cheap", [512, 16])
def test_prompt_predictions_are_recorded(zoo, llm, monkeypatch, n_cheap):
    """Of the last rows, as many as are cheap; more than a tree has nodes, in parts."""
    monkeypatch.setattr(Engine, "_cheap_rows", lambda _: n_cheap)
    monkeypatch.setattr(runner, "_READ_ROWS", 15)
    model = zoo.pair("llama", 0).model
    drafter = TextDrafter(PARTS)
    prompt = prompt_of(0, 40)
    engine = engine_of(llm, drafter, n_nodes=N_NODES)
    engine.add(Sequence(list(prompt), SamplingParams(8), 128))
    engine.step()
    best = torch.softmax(logits_of(model, prompt), -1).topk(8)
    table = drafter._recycler.table
    for end in range(3, 41):
        context = tuple(prompt[end - 3 : end])
        assert (context in table._after) == (end > 39 - n_cheap)
        if context in table._after:
            successors = found(table, context)
            assert list(successors) == best.indices[end - 1].tolist()
            np.testing.assert_allclose(list(successors.values()), best.values[end - 1], rtol=1e-3)


@pytest.mark.parametrize("name", ["lookahead", "ngram", "recycle"])
def test_no_tree_if_rows_are_expensive(llm, name):
    """Also for a repetitive text; with cheap rows a tree is drafted."""
    for cost, is_off in ((Steady(pass_s=lambda n_rows: 1.0 * n_rows), True), (Steady(), False)):
        drafter = drafter_type(name).open(replace(PARTS, cost=cost))
        sequences = [Sequence(prompt_of(0, 12) * 3, SamplingParams(8), 128) for _ in range(2)]
        engine = engine_of(llm, drafter, n_nodes=N_NODES)
        engine.add(sequences[0])
        while engine.step():
            pass
        (tree,) = drafter.propose(sequences[1:], N_NODES)
        assert (len(tree.topology) == 1) == is_off
        assert (sequences[0].stats.n_nodes == 8) == is_off


def test_rows_of_a_pass_go_to_the_best_predicted_sequence(monkeypatch):
    """A badly predicted sequence gets no rows that are cheap only because of the batch."""
    monkeypatch.setattr(recycler, "_PRIOR", (1.0,) * 7)
    cost = Steady(pass_s=lambda n_rows: 1.0 + np.maximum(n_rows - 10, 0))
    drafter = TextDrafter(replace(PARTS, cost=cost))
    for before in (1, 2, 3, 4, 5, 11, 12, 13):
        drafter._recycler.table.keep((before,), [before + 1], [0.9 if before < 9 else 0.5])
    sequences = [Sequence([start], SamplingParams(20), 128) for start in (1, 11)]
    assert [len(tree.topology) for tree in drafter.propose(sequences, N_NODES)] == [6, 4]
    drafter._recycler.table.keep((12,), [13], [0.001])
    assert [len(tree.topology) for tree in drafter.propose(sequences, N_NODES)] == [6, 2]


def test_wrong_predictions_end_drafting_until_they_are_right():
    """Root predictions are compared with the text also in passes without a tree."""
    cost = Steady(pass_s=lambda n_rows: 0.9 + 0.1 * n_rows)
    drafter = TextDrafter(replace(PARTS, cost=cost, pair_stats=PairStats()))
    sequence = Sequence([7], SamplingParams(99), 128)
    sizes = []
    for token in [2] * 30 + [1] * 60:
        drafter._recycler.table.keep((7,), [1], [0.9])
        (tree,) = drafter.propose([sequence], N_NODES)
        path = (1,) if token == 1 and len(tree.topology) > 1 else ()
        sizes.append(len(tree.topology))
        drafter.learn(sequence, tree, Verdict(path, 3 if path else token), None)
    assert sizes[0] > 1 and sizes[10:30] == [1] * 20
    assert sizes[-1] > 1
    acceptance = drafter.estimates_at(0.0).acceptance
    assert acceptance.hits[0] / acceptance.tries[0] == pytest.approx(60 / 90, abs=0.05)


VOCAB_SIZE = 9
triples = st.tuples(*[st.integers(0, 1)] * 3)
PROBS = [0.5, 0.25, 0.125]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("predictions") / PREDICTIONS_FILE


@settings(deadline=None)
@given(st.lists(st.tuples(triples, st.permutations(range(VOCAB_SIZE))), min_size=1), triples)
def test_longest_known_suffix_has_the_mean_of_its_predictions(path, rows, context):
    contexts = np.array([row[0] for row in rows])
    tokens = np.array([row[1][: len(PROBS)] for row in rows])
    write_predictions(path, contexts, tokens, np.array([PROBS] * len(rows)))
    stored = StoredPredictions(path, VOCAB_SIZE)
    wanted = Counter()
    for k in range(3):
        equal = [row for row in rows if row[0][k:] == context[k:]]
        for row in equal:
            for token, p in zip(row[1], PROBS, strict=False):
                wanted[token] += p / len(equal)
        if equal:
            break
    found = next((entry for k in range(3) if (entry := stored.find(context[k:]))), ((), ()))
    best = dict(wanted.most_common(N_STORED))
    assert sorted(found[1], reverse=True) == pytest.approx(list(best.values()), rel=1e-3)
    for token, p in zip(*found, strict=True):
        assert p == pytest.approx(wanted[token], rel=1e-3)


def test_own_predictions_precede_stored_ones_of_equal_length(path):
    contexts = np.array([[1, 2, 3], [5, 2, 3]])
    write_predictions(path, contexts, np.array([[4], [5]]), np.ones((2, 1)))
    table = PredictionTable(stored=StoredPredictions(path, VOCAB_SIZE))

    def first(context):
        prediction = table.find(context)
        return prediction.kind, prediction.tokens[0]

    assert first((1, 2, 3)) == (6, 4)
    table.keep((2, 3), [6], [1.0])
    assert first((1, 2, 3)) == (6, 4) and first((7, 2, 3)) == (2, 6)
    table.keep((1, 2, 3), [7], [1.0])
    assert first((1, 2, 3)) == (3, 7)


@pytest.mark.parametrize("is_beside_draft", [False, True])
def test_first_answer_is_drafted_from_the_file(pair, tmp_path, is_beside_draft):
    prompt = prompt_of(0, 12)
    expected = [*generate(pair.model, prompt, 24)]
    if is_beside_draft:
        for file in pair.draft.iterdir():
            (tmp_path / file.name).symlink_to(file)
        choice = {"draft_model": tmp_path}
    else:
        choice = {"drafter": "recycle", "draft_predictions": tmp_path / PREDICTIONS_FILE}
    tokens_per_pass = []
    for text in (prompt_of(1, 12), prompt + expected):
        best = torch.softmax(logits_of(pair.model, text), -1)[2:].topk(8)
        parts = torch.tensor(text).unfold(0, 3, 1), best.indices, best.values
        write_predictions(tmp_path / PREDICTIONS_FILE, *(part.numpy() for part in parts))
        with open_llm(pair.target, tree_size=16, **choice) as llm:
            (answer,) = llm.generate(prompt, SamplingParams(max_tokens=24))
        assert answer.token_ids == expected
        tokens_per_pass.append(answer.stats.tokens_per_pass)
    assert tokens_per_pass[1] > tokens_per_pass[0]


def test_wrong_files_are_refused_in_a_sentence(tmp_path):
    path = tmp_path / PREDICTIONS_FILE
    with pytest.raises(SettingsError, match="is not a file of predictions: No such file"):
        StoredPredictions(path, 4)
    path.write_text("text")
    with pytest.raises(SettingsError, match="is not a file of predictions"):
        StoredPredictions(path, 4)
    write_predictions(path, np.array([[1, 2, 3]]), np.array([[4]]), np.ones((1, 1)))
    with pytest.raises(SettingsError, match="belongs to another model: needs tokens below 4"):
        StoredPredictions(path, 4)

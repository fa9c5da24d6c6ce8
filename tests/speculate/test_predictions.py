"""Predictions of the target in a file: their means, and their use from the first answer on."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny import generate, logits_of, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.errors import SettingsError
from offload_rt.speculate.predictions import (
    N_STORED,
    PREDICTIONS_FILE,
    StoredPredictions,
    write_predictions,
)
from offload_rt.speculate.recycler import PredictionTable

VOCAB_SIZE = 9
few_tokens = st.integers(0, 1)
rows = st.lists(
    st.tuples(st.tuples(*[few_tokens] * 3), st.permutations(range(VOCAB_SIZE))), min_size=1
)
PROBS = [0.5, 0.25, 0.125]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("predictions") / PREDICTIONS_FILE


@settings(deadline=None)
@given(rows, st.tuples(*[few_tokens] * 3))
def test_longest_known_suffix_has_the_mean_of_its_predictions(path, rows, context):
    contexts = np.array([row[0] for row in rows])
    tokens = np.array([row[1][: len(PROBS)] for row in rows])
    write_predictions(path, contexts, tokens, np.array([PROBS] * len(rows)))
    stored = StoredPredictions.read(path, VOCAB_SIZE)
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
    table = PredictionTable(stored=StoredPredictions.read(path, VOCAB_SIZE))

    def first(context):
        prediction = table.find(context)
        return prediction.kind, prediction.tokens[0]

    assert first((1, 2, 3)) == (6, 4)
    table.keep((2, 3), [6], [1.0])
    assert first((1, 2, 3)) == (6, 4) and first((7, 2, 3)) == (2, 6)
    table.keep((1, 2, 3), [7], [1.0])
    assert first((1, 2, 3)) == (3, 7)


def write_own(path, model, text):
    """Write the target's predictions after each three tokens of a text."""
    best = torch.softmax(logits_of(model, text), -1)[2:].topk(8)
    contexts = torch.tensor(text).unfold(0, 3, 1)
    write_predictions(path, *(part.numpy() for part in (contexts, best.indices, best.values)))


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
        write_own(tmp_path / PREDICTIONS_FILE, pair.model, text)
        with open_llm(pair.target, tree_size=16, **choice) as llm:
            (answer,) = llm.generate(prompt, SamplingParams(max_tokens=24))
        assert answer.token_ids == expected
        tokens_per_pass.append(answer.stats.tokens_per_pass)
    assert tokens_per_pass[1] > tokens_per_pass[0]


def test_wrong_files_are_refused_in_a_sentence(tmp_path):
    path = tmp_path / PREDICTIONS_FILE
    with pytest.raises(SettingsError, match="is not a file of predictions: No such file"):
        StoredPredictions.read(path, 4)
    path.write_text("text")
    with pytest.raises(SettingsError, match="is not a file of predictions"):
        StoredPredictions.read(path, 4)
    write_predictions(path, np.array([[1, 2, 3]]), np.array([[4]]), np.ones((1, 1)))
    with pytest.raises(SettingsError, match="belongs to another model: needs tokens below 4"):
        StoredPredictions.read(path, 4)

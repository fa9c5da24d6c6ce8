"""Lookahead decoding: trees and steps of the published algorithm, without a cache or a tree."""

import random

from hypothesis import given
from hypothesis import strategies as st
from support.tiny import CASES, Steady, engine_of, generate, logits_of, open_llm, prompt_of

from offload_rt import SamplingParams
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.draft.lookahead import Lookahead, NgramPool
from offload_rt.speculate.protocols import DraftParts

N_NEW = 90
LENGTH = 5
COLUMNS = 6
# Half of the rows for the window, half for as many n-grams.
N_ROWS = 2 * COLUMNS * (LENGTH - 1)


def published(model, prompt):
    """Text and steps of lookahead decoding at temperature 0, with n-grams of the text in the pool.

    Of each step, the n-grams that are verified, and the paths of the window's last row. In the
    authors' code, nothing is verified until the window is full.
    """
    text = list(prompt)
    steps = []
    rows = [random.Random(0).choices(text, k=COLUMNS + LENGTH - 3)]
    pool = {}

    def remember(ngram):
        known = pool.setdefault(ngram[0], [])
        rest = tuple(ngram[1:])
        if rest in known:
            known.remove(rest)
        elif len(known) == COLUMNS:
            known.pop(0)
        known.append(rest)

    def greedy(path):
        return logits_of(model, [*text, *path])[len(text) - 1 :].argmax(-1).tolist()

    for start in range(len(text) - LENGTH + 1):
        remember(text[start : start + LENGTH])
    while len(text) < len(prompt) + N_NEW:
        first = [text[-1], *rows[0]]
        is_full = len(rows) == LENGTH - 1
        guesses = pool.get(text[-1], [])
        paths = [(*first[1 : i + 1], *(row[i] for row in rows[1:])) for i in range(len(first))]
        steps.append((set(guesses), paths))
        predicted = [greedy(path)[-1] for path in paths]
        taken = greedy(())
        for guess in guesses:
            said = greedy(guess)
            n_right = next((i for i in range(len(guess)) if guess[i] != said[i]), len(guess))
            taken = max(taken, said[: n_right + 1], key=len)
        if is_full:
            for i, token in enumerate(predicted):
                remember([first[i], *(row[i] for row in rows[1:]), token])
            rows = [rows[1][1:], *rows[2:], predicted]
        else:
            rows = [*(row[1:] for row in rows), predicted[1:]]
        for token in taken:
            text.append(token)
            if len(text) >= LENGTH:
                remember(text[-LENGTH:])
    return text[len(prompt) :], steps


def step_of(tree, n_columns):
    """The leaves of the candidates, and the paths of the window's last row of so many entries."""
    n = len(tree.topology)
    paths = tree.paths()
    children = tree.candidates().topology.children
    leaves = {paths[node] for node in range(1, len(children)) if not children[node]}
    last_row = [0, *range(n - tree.n_unverified, n)][-n_columns:]
    return leaves, [paths[node] for node in last_row]


def test_trees_and_steps_equal_the_published_algorithm(tmp_path):
    """With a model whose next token depends on the last few tokens."""
    model = CASES["llama"].build(3, num_hidden_layers=2, vocab_size=64)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.15
        layer.mlp.down_proj.weight.data *= 0.3
    model.save_pretrained(tmp_path)
    prompt = prompt_of(0, 24, 64)
    trees = []

    with open_llm(tmp_path, max_model_len=256) as llm:
        limits = DraftLimits(N_ROWS, 64, fixed_size=True)
        drafter = Lookahead(DraftParts(limits, Steady(), "without_replacement"))
        engine = engine_of(llm, drafter, n_nodes=N_ROWS)
        # There is room behind the text, so that the window is never cut at its end.
        sequence = Sequence(list(prompt), SamplingParams(N_NEW + 64), 256)
        engine.add(sequence)
        learn = drafter.learn
        drafter.learn = lambda *seen: trees.append(seen[1]) or learn(*seen)
        while sequence.n_new < N_NEW:
            engine.step()
    text, steps = published(model, prompt)
    assert text[:N_NEW] == sequence.tokens[24:][:N_NEW] == generate(model, prompt, N_NEW)
    assert [step_of(tree, len(step[1])) for tree, step in zip(trees, steps, strict=True)] == steps
    assert max(len(tree.topology) for tree in trees) > N_ROWS // 2
    assert len(steps) < 0.8 * N_NEW


ngrams = st.lists(st.tuples(*[st.integers(0, 3)] * 3), max_size=40)


@given(ngrams, st.integers(1, 9))
def test_pool_is_bounded(several, n_most):
    """The last n-gram stays where its first token has no more than there is room for."""
    pool = NgramPool(n_most)
    for ngram in several:
        pool.add([ngram])
        n_kept = sum(len(pool.after(token, 99)) for token in range(4))
        assert n_kept <= n_most
        assert ngram[1:] in pool.after(ngram[0], 99) or n_kept == 0

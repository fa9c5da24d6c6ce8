"""Pauses of drafting, by simulated times and in real passes."""

from itertools import accumulate, repeat
from operator import mul

import pytest
from support.heads import VOCAB, few_tokens, random_head
from support.tiny import Steady, open_llm, pause_often, prompt_of, sequence_of

from offload_rt import SamplingParams
from offload_rt.executor.sequence import PassTimes
from offload_rt.speculate import head_model
from offload_rt.speculate.pauses import Pauses


def simulate(drafted, pauses, plain_s=0.9, n_rows=100):
    """Generate 400 tokens; return the seconds beyond plain decoding, and which passes had drafts.

    drafted  seconds and tokens of a drafted pass after some tokens
    n_rows   of a drafted pass; by the estimate, 100 rows cost a tenth of a pass
    """
    sequence = sequence_of(0)
    total, ways = 0.0, []
    while sequence.n_new < 400:
        ways.append(pauses.drafts([sequence]))
        seconds, n = drafted(sequence.n_new) if ways[-1] else (plain_s, 1)
        rows = n_rows if ways[-1] else 1
        pauses.passed(PassTimes(0.0, 0.0, seconds, seconds, 0, 0.0, 0.0, seconds, rows), n)
        sequence.tokens.extend([7] * n)
        total += seconds
    return total - plain_s * sequence.n_new, ways


@pytest.mark.parametrize("growth", [1.0, 1.1])  # of the estimate, with each question
@pytest.mark.parametrize("time", [1.05, 1.3, 2.0])
def test_wrong_drafts_cost_little(time, growth):
    """Never a right token, at a cost of 5 to 100 % of a plain pass: 2 %, and up to two passes."""
    factors = accumulate(repeat(growth), mul)
    cost = Steady(pass_s=lambda n_rows: next(factors) * (1.0 + n_rows / 1000))
    cost.fixed = lambda level_s: Steady()
    pauses = Pauses(cost)
    for _ in range(3):  # each sequence begins with drafts
        lost, ways = simulate(lambda _: (0.9 * time, 1), pauses)
        assert lost <= 0.9 * (0.02 * 400 + 2) and ways[0]


@pytest.mark.parametrize(("drafted", "settings", "n_plain", "gains"), [
    (lambda _: (1.2, 3), {}, 0, True),
    (lambda _: (1.2, 3), {"plain_s": 1.2}, 0, True),
    # Small gains: plain passes are measured alone.
    (lambda _: (1.6, 2), {}, 8, True),
    # Free rows: slow passes of an uneven link are no reason.
    (lambda n: (1.3 if n % 4 else 0.9, 1), {"n_rows": 10}, 0, False),
    # Drafting resumes when the text changes.
    (lambda n: (1.2, 1 if n < 100 else 4), {}, None, True),
])  # fmt: skip
def test_drafts_that_gain_or_are_free_continue(drafted, settings, n_plain, gains):
    lost, ways = simulate(drafted, Pauses(Steady()), **settings)
    assert ways.count(False) == n_plain or (n_plain is None and not all(ways[4:40]))
    assert lost < 0 or not gains


@pytest.mark.parametrize("kind", ["eagle", "medusa", "qwen", "model"])
def test_a_prompt_may_be_repeated_while_drafting_pauses(tmp_path, pair, monkeypatch, kind):
    """A tree is committed once: later answers take its cache over without a tree."""
    settings = {"directory": pair.target, "draft_model": str(pair.draft)}
    if kind != "model":
        settings = random_head(tmp_path, kind, few_tokens()).settings

    def drafts(pauses, batch):
        pauses.is_drafting = not answers and batch[0].n_new == 1
        return pauses.is_drafting

    pause_often(monkeypatch)
    monkeypatch.setattr(Pauses, "drafts", drafts)
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logit_bias={5: 100})
    answers = []
    with open_llm(**settings, place="resident", tree_size=12, max_model_len=128) as llm:
        for _ in range(4):
            answers += llm.generate([5] * 30, params)
        drafted = llm.engine.drafter.estimates_at(0.0).drafted
    assert drafted.means[0] < 1, "pauses count as passes"
    assert [answer.token_ids for answer in answers] == [[5] * 12] * 4


@pytest.mark.parametrize("kind", ["eagle", "medusa", "qwen"])
def test_hidden_states_that_wait_lead_to_the_same_trees(tmp_path, monkeypatch, steady, kind):
    """Converted for the next tree, in groups of a few, or in every pass."""
    settings = random_head(tmp_path, kind, few_tokens()).settings
    trees = []
    for most in (64, 3, 0):
        pause_often(monkeypatch)
        monkeypatch.setattr(head_model, "_MOST_WAITING", most)
        with open_llm(**settings, place="resident", tree_size=12) as llm:
            (output,) = llm.generate(prompt_of(0, 30, VOCAB), SamplingParams(max_new_tokens=40))
        stats = output.stats
        trees.append((stats.n_passes, stats.nodes_per_tree, stats.predicted_tokens_per_pass))
    assert trees[0] == trees[1] == trees[2]
    assert trees[0][1] > 4, "heads draft after pauses"

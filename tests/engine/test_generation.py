"""Whole generations: greedy tokens, batches, ends, sampled texts, and results that users print."""

import json
from functools import partial
from itertools import cycle, pairwise
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.checkpoints import add_tokenizer, speaking_checkpoint
from support.gguf_files import build
from support.texts import N_NEW, assert_distribution, exact_distribution, run_together, small_model
from support.tiny import (
    CASES,
    DYNAMIC,
    PLACES,
    byte_level,
    generate,
    open_llm,
    prompt_of,
    random_tree,
)
from transformers import LlamaForCausalLM

from offload_rt import SamplingParams
from offload_rt.cli import run
from offload_rt.cost.tree_size import DraftLimits
from offload_rt.errors import CapacityError, PromptError, SettingsError
from offload_rt.executor.sequence import Sequence
from offload_rt.ops import cpu
from offload_rt.speculate.protocols import Drafter
from offload_rt.tree.topology import DraftTree, Topology

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("name", "place"), zip(CASES, cycle(PLACES)))
def test_greedy_tokens_equal_transformers(zoo, name, place):
    with open_llm(zoo.directory(name, 0), place) as llm:
        output = llm.generate(prompt_of(0)).pop()
    assert output.token_ids == zoo.greedy(name, 0)
    assert len(set(output.token_ids)) >= 12, "a text that goes round in circles shows little"
    assert output.prompt_token_ids == prompt_of(0)
    assert output.finish_reason == "length"
    assert (output.stats.n_tokens, output.stats.n_passes) == (64, 64)


def together(llm, prompts, params):
    outputs = llm.generate(prompts, params)
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


def alone(llm, prompts, params):
    return [together(llm, *one)[0] for one in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("place", ["resident", "mixed"])
def test_batch_rows_equal_solo_runs(tmp_path, monkeypatch, place):
    """Different lengths, different ends, greedy and sampled side by side, within a window.

    Cache rows never exceed the plan; waiting sequences join when others end.
    """
    CASES["mistral"].build(0, vocab_size=320, eos_token_id=7).save_pretrained(tmp_path)
    add_tokenizer(tmp_path, byte_level(320))
    prompts = [prompt_of(seed, n) for seed, n in enumerate((1, 30, 7, 12, 19, 3))]
    params = [
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=40),
        SamplingParams(max_new_tokens=17, temperature=1.0, seed=3),
        SamplingParams(24, 0.9, top_p=0.95, top_k=50, min_p=0.01, repetition_penalty=1.1, seed=5),
        SamplingParams(max_new_tokens=30, stop=("a", "e", "o", "t")),
        SamplingParams(max_new_tokens=30, temperature=1.5, seed=3, stop=(" ", "u", "n")),
    ]
    with open_llm(tmp_path, place, max_model_len=90) as llm:
        solo = alone(llm, prompts, params)
        runner = llm.engine.runner
        forward = runner.forward
        running = []

        def counted(steps):
            running.append({step.cache for step in steps})
            n_rows = sum(runner.n_committed(step.cache) + len(step.tokens) for step in steps)
            assert n_rows <= llm.spec.memory.cache_rows
            return forward(steps)

        monkeypatch.setattr(runner, "forward", counted)
        assert together(llm, prompts, params) == solo
        joined = [after - before and after & before for before, after in pairwise(running)]
        assert any(joined), "nobody joined while others went on"
        order = [4, 2, 0, 5, 3, 1]
        turned = together(llm, [prompts[i] for i in order], [params[i] for i in order])
        assert turned == [solo[i] for i in order]
    assert 1 < max(map(len, running)) < len(prompts)
    assert {len(tokens) for tokens, _, _ in solo} >= {1, 40}
    assert {reason for _, _, reason in solo} == {"stop", "length"}


def measured(sequence):
    """The tokens of each of its passes that was predicted."""
    return [n for times, _, n in sequence.stats.passes if times.predicted_s is not None]


def test_prompt_passes_do_not_train_the_cost_model(zoo, monkeypatch):
    """They are not predicted either. The first plain pass is a measurement."""
    with open_llm(zoo.directory("llama", 0), max_model_len=256) as llm:
        passed = Mock(wraps=llm.engine.cost.passed)
        monkeypatch.setattr(llm.engine.cost, "passed", passed)
        first, second = (
            llm.requests.build(prompt_of(seed), SamplingParams(max_new_tokens=n)).sequences[0]
            for seed, n in ((0, 9), (1, 4))
        )
        llm.engine.add(first)
        for n_step in range(9):
            if n_step == 3:
                llm.engine.add(second)
            llm.engine.step()
    assert [call.args[0] for call in passed.call_args_list] == [1, 1, 2, 2, 2, 1, 1]
    _, (plain, _, _), (later, _, _), *_ = first.stats.passes
    assert plain.predicted_s == plain.ended - plain.started
    assert later.predicted_s != later.ended - later.started
    assert (len(first.stats.passes), measured(first)) == (9, [1] * 7)
    assert (len(second.stats.passes), measured(second)) == (4, [1] * 3)


def test_seed_determines_the_tokens(zoo):
    texts = []
    with open_llm(zoo.directory("llama", 0)) as llm:
        for seed in (1, 2, 3, 1, None, None):
            params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=seed)
            texts.append(llm.generate(prompt_of(0), params)[0].token_ids)
    assert texts[0] == texts[3] and len(set(map(tuple, texts))) == 5


class Drafts(Drafter):
    """Drafter of trees by a function of the sequence."""

    def __init__(self, tree, *limits):
        self._tree = tree
        self.limits = DraftLimits(*limits)

    def learn(self, sequence, tree, verdict, predicted=None):
        pass

    def propose(self, sequences, n_nodes):
        return list(map(self._tree, sequences))


def true_tree(true, sequence):
    """A random tree that contains parts of the true continuation."""
    n = sequence.n_new
    topology = random_tree(1 + n % 12, n)
    tokens = torch.tensor(prompt_of(n, len(topology)))
    for node, depth in enumerate(topology.depths.tolist()):
        if node % 3 and n + depth <= len(true):
            tokens[node] = true[n + depth - 1]
    tokens[0] = sequence.tokens[-1]
    return DraftTree(topology, tokens)


def test_dynamic_rope_grows_past_the_limit(tmp_path):
    """The frequencies change with every token, in trees as well."""
    model = CASES["llama"].build(0, **DYNAMIC | {"max_position_embeddings": 40})
    model.save_pretrained(tmp_path)
    for n_prompt in (30, 50):
        prompt = prompt_of(2, n_prompt)
        # afresh: it remembers how far it has grown
        model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
        expected = generate(model, prompt, 50)
        with open_llm(tmp_path, max_model_len=40) as llm:
            sequence = Sequence(list(prompt), SamplingParams(50), 160)
            drafter = Drafts(partial(true_tree, expected), 12, 12)
            got = run_together(llm, drafter, "match", [sequence], 12)
        assert got == [expected]
        assert len(sequence.stats.passes) < 40, "trees were accepted"


def test_length_limits_end_with_length(zoo):
    prompts = [prompt_of(0), prompt_of(0), prompt_of(0, 39)]
    params = [SamplingParams(max_new_tokens=n) for n in (3, 64, 64)]
    with open_llm(zoo.directory("llama", 0), max_model_len=40) as llm:
        outputs = llm.generate(prompts, params)
        with pytest.raises(CapacityError, match="39"):
            llm.generate(prompt_of(0, 40))
    model = zoo.model("llama", 0)
    for prompt, output, n_new in zip(prompts, outputs, (3, 19, 1), strict=True):
        assert output.token_ids == generate(model, prompt, n_new)
        assert output.finish_reason == "length"


@pytest.mark.parametrize(("prompts", "error"), [
    ([], PromptError), ([1, 128], PromptError), ([-1], PromptError), ("text", PromptError),
    ([1] * 200, CapacityError),
])  # fmt: skip
def test_invalid_prompt_is_refused_before_any_pass(zoo, prompts, error):
    with open_llm(zoo.directory("llama", 0)) as llm:
        with pytest.raises(error):
            llm.generate([[1, 2], prompts])
        with pytest.raises(SettingsError):
            llm.generate([[1], [2]], [SamplingParams()] * 3)
        with pytest.raises(PromptError, match="stop"):
            llm.generate([1], SamplingParams(stop=("x",)))


NEEDS_LIBRARY = pytest.mark.skipif(cpu.library() is None, reason="needs a C++ compiler")


@NEEDS_LIBRARY
@pytest.mark.parametrize("type", ["Q4_0", "Q8_0"])
def test_rounded_activations_have_the_logits_of_plain_decoding_in_trees(type, tmp_path):
    """Other logits than exact products."""
    path = tmp_path / "m.gguf"
    build(path, CASES["llama"].build(0), type)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=5, ignore_eos=True)

    def logprobs(activations, drafter):
        with open_llm(path, activations=activations, drafter=drafter, dtype="float32") as llm:
            return llm.generate(prompt_of(0), params)[0].logprobs

    plain = logprobs("int8", "none")
    assert plain == logprobs("int8", "recycle") != logprobs("exact", "none")


@NEEDS_LIBRARY
def test_activations_are_rounded_only_for_integer_codes_on_a_cpu(zoo, tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match="quantised GGUF types or int8, has none"):
        open_llm(zoo.directory("llama", 0), activations="int8")
    build(tmp_path / "m.gguf", CASES["llama"].build(0), "Q8_0")
    monkeypatch.setattr(cpu, "library", lambda: None)
    with pytest.raises(SettingsError, match="needs the CPU library"):
        open_llm(tmp_path / "m.gguf", activations="int8")
    with pytest.raises(SettingsError, match=r"16 or 32 bits, has cpu in torch\.float64"):
        open_llm(tmp_path / "m.gguf", activations="int8", dtype="float64")


# The distribution of sampled texts

VOCABULARY = 5
N_DRAWS = 500


ALL_AT_ONCE = {
    "temperature": 0.8, "top_k": 4, "top_p": 0.93, "min_p": 0.04, "repetition_penalty": 3.0,
}  # fmt: skip
# The last two keep a token from coming within the texts that are drawn.
COUNTED = {
    "temperature": 0.8, "presence_penalty": 0.7, "frequency_penalty": 0.9,
    "logit_bias": {0: 0.8, 3: -0.6}, "min_tokens": N_NEW, "stop_token_ids": (2,),
}  # fmt: skip


FULL = 1 + VOCABULARY + VOCABULARY**2


def full_tree(sizes, sequence):
    """A tree with every token below every node."""
    n = next(sizes)
    parents = np.array([-1, *np.arange(1 + VOCABULARY).repeat(VOCABULARY)])
    tokens = torch.arange(-1, n - 1) % VOCABULARY
    tokens[0] = sequence.tokens[-1]
    return DraftTree(Topology(parents[:n]), tokens)


@pytest.mark.slow
def test_joint_distribution_of_sampled_tokens(tmp_path):
    """Two prompts side by side, a seed per row, against exact enumeration; trees change no text."""
    model = small_model(VOCABULARY, n_layers=2)
    model.save_pretrained(tmp_path)
    prompts = [[1], [2, 2]]
    settings = (ALL_AT_ONCE, COUNTED)  # of the one prompt and of the other
    params = [
        SamplingParams(max_new_tokens=N_NEW, seed=seed, **settings[seed % 2])
        for seed in range(2 * N_DRAWS)
    ]
    with open_llm(tmp_path, max_model_len=64) as llm:

        def texts_of(drafter, start):
            # Comparing prefixes within a batch takes time quadratic in its size.
            batch = [
                Sequence(list(prompts[i % 2]), params[i], 17) for i in range(start, start + 100)
            ]
            return run_together(llm, drafter, "match", batch, 31)

        plain = [texts_of(llm.engine.drafter, start) for start in range(0, 2 * N_DRAWS, 100)]
        full_trees = partial(full_tree, cycle((1 + VOCABULARY, FULL, 1)))
        assert texts_of(Drafts(full_trees, FULL, 3), 0) == plain[0]
    texts = [text for batch in plain for text in batch]
    for n, prompt in enumerate(prompts):
        assert_distribution(texts[n::2], exact_distribution(model, prompt, params[n]))


def test_json_lists_all_answers_as_outputs(tmp_path, capsys):
    given = [str(speaking_checkpoint(tmp_path)), "the fox", "--device", "cpu", "--quiet"]
    given += ["--max-model-len", "64"]
    assert run.main([*given, "--json", "--n", "3", "--temperature", "1", "--max-tokens", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [answer["index"] for answer in record["outputs"]] == [0, 1, 2]
    assert record["outputs"][0]["text"] == record["text"]

"""Structured outputs: masks of draft trees, and answers of every drafter and rule."""

import json
import random
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.tiny import (
    CASES,
    EACH_IN_ONE,
    SMALLER,
    assert_drawn,
    byte_level,
    keep_steady,
    logits_of,
    nearly,
    open_llm,
    random_tree,
    save_pair,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bench.common.checkpoints import TARGET
from offload_rt import SamplingParams, StructuredOutputs
from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import GrammarCompiler
from offload_rt.executor.sequence import Sequence
from offload_rt.speculate.forced_chains import append_forced
from offload_rt.tree.topology import DraftTree, Topology, Verdict

VOCAB = 336  # more tokens than the tokenizer has
END = 320
CHOICES = ["the fox", "the dog", "the", "quick", "quick fox jumps", "a", "ab"]
PROMPT = "the quick brown"
SCHEMAS = [
    {"type": "object", "properties": properties, "required": required}
    for properties, required in (
        ({"kind": {"enum": ["fox", "dog"]}, "sizes": {"type": "array", "items": {"type": "integer"},
            "maxItems": 3}, "name": {"type": "string", "maxLength": 4},
            "is_lazy": {"type": "boolean"}}, ["kind", "is_lazy"]),
        ({"the": {"enum": ["the", None]}, "a": {"type": "object", "properties": {
            "fox": {"type": "null"}, "dog": {"type": "array", "items": {"enum": ["fox", 1]},
            "maxItems": 2}}, "required": ["dog"]}}, ["a"]),
        ({"dog": {"type": "string", "maxLength": 1}, "fox": {"type": "integer"}}, []),
    )
]  # fmt: skip


def tokenizer_with_end():
    tokenizer = byte_level()
    assert tokenizer.add_special_tokens(["<|end|>"]) == 1
    return tokenizer


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    model = CASES["llama"].build(0, vocab_size=VOCAB, **SMALLER)
    model.generation_config.eos_token_id = END
    folder = tmp_path_factory.mktemp("structured")
    return save_pair(folder, model, nearly(model, 0.03), tokenizer_with_end())


@pytest.fixture(scope="module")
def llm(pair):
    with open_llm(pair.target) as llm:
        yield llm


@pytest.fixture(scope="module")
def compiler(llm):
    compiler = GrammarCompiler(llm.tokenizer, VOCAB, {END})
    yield compiler
    compiler.close()


def bits(masks):
    """(n, vocabulary) bool"""
    return np.unpackbits(masks.numpy().view(np.uint8), axis=1, bitorder="little").astype(bool)


def allowed_by(grammar):
    """Tokens that may follow."""
    return np.flatnonzero(bits(grammar.masks_after([()]))[0]).tolist()


def mask_after(compiler, tokens):
    """Allowed tokens of plain decoding; None if it cannot produce these tokens."""
    grammar = compiler.compile(StructuredOutputs(choice=CHOICES))
    for token in tokens:
        if token not in allowed_by(grammar):
            return None
        grammar.advance(token)
    return set(allowed_by(grammar))


def test_masks_of_random_trees_equal_masks_of_plain_decoding(compiler):
    n_checked = 0
    for seed in range(30):
        rng = random.Random(seed)
        topology = random_tree(24, seed)
        grammar = compiler.compile(StructuredOutputs(choice=CHOICES))
        committed = []
        if seed % 2:
            committed.append(rng.choice(sorted(mask_after(compiler, []))))
            grammar.advance(committed[0])
        tokens = [0]
        for node in range(1, 24):
            path = [tokens[above] for above in topology.path_to(int(topology.parents[node]))]
            allowed = mask_after(compiler, committed + path) or set(range(END))
            tokens.append(rng.choice(sorted(allowed)) if rng.random() < 0.8 else rng.randrange(END))
        grammar.start_masks(DraftTree(topology, torch.tensor(tokens)).paths())
        for node, row in enumerate(bits(grammar.masks())):
            path = [tokens[above] for above in topology.path_to(node)]
            plain = mask_after(compiler, committed + path)
            if plain is not None and END not in path:
                n_checked += 1
                assert set(np.flatnonzero(row)) == plain
    assert n_checked > 200


def formats():
    return [
        *(StructuredOutputs(json=schema) for schema in SCHEMAS),
        StructuredOutputs(regex="[a-f]{2,5}(-[0-9]{1,3})*"),
        StructuredOutputs(choice=CHOICES),
        StructuredOutputs(grammar='start: "the " animal+\nanimal: "fox" | "dog" | "[" animal "]"'),
    ]


def test_rejected_objects_leave_no_trace_in_masks_of_a_list():
    """Tokens of several characters, as in the vocabulary of the demonstration model."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    compiler = GrammarCompiler(tokenizer, len(tokenizer), {tokenizer.eos_token_id})
    drafted = compiler.compile(StructuredOutputs(json_object=True))
    plain = drafted.copy()
    answer, rejected, accepted = (
        tokenizer(text, add_special_tokens=False).input_ids
        for text in ('{":}ad":', ' {",{', ' [":losing')
    )
    for token in answer:
        drafted.advance(token)
    drafted.masks_after([tuple(rejected)])
    for token in accepted:
        drafted.advance(token)
    for token in [*answer, *accepted]:
        plain.advance(token)
    assert torch.equal(drafted.masks_after([()]), plain.masks_after([()]))
    compiler.close()


def test_forced_tokens_need_no_pass(llm, monkeypatch):
    """An answer of one text takes a pass for its first token only; answers share a grammar."""
    outputs = StructuredOutputs(choice=["the fox jumps over the lazy dog"])
    params = SamplingParams(structured_outputs=outputs)
    forced, plain = llm.generate([PROMPT] * 2, [params, replace(params, logprobs=0)])
    assert forced.text == outputs.choice[0] and forced.finish_reason == "stop"
    assert forced.token_ids == plain.token_ids
    assert (forced.stats.n_passes, plain.stats.n_passes) == (1, len(plain.token_ids))
    compiler = llm.requests._compiler
    monkeypatch.setattr(compiler, "compile", compiled := Mock(wraps=compiler.compile))
    (several,) = llm.generate(PROMPT, replace(params, n=3, temperature=1.0))
    assert [answer.text for answer in several.outputs] == [*outputs.choice] * 3
    assert compiled.call_count == 1


def test_forced_tokens_extend_the_leaves_of_a_tree(llm, compiler):
    """Up to the room of the pass and of the sequence. Drafters learn from their own nodes."""
    q, z, k = (llm.tokenizer.convert_tokens_to_ids(letter) for letter in "qzk")
    grammar = compiler.compile(StructuredOutputs(regex="(q|z)jjjj(k|w)"))
    sequence = Sequence([0], SamplingParams(max_tokens=20), 64, grammar=grammar)
    tree = DraftTree(Topology(np.array([-1, 0, 0])), torch.tensor([0, q, z]))

    def extended(n_nodes, tree=tree):
        return append_forced([tree], [sequence], n_nodes, None)[0]

    whole = extended(64)
    chains = [llm.tokenizer.decode(path) for path in whole.paths()]
    assert chains[-1] == "zjjjj" and "qjjjj" in chains
    assert whole.n_forced == len(chains) - 3 and whole.paths()[3][0] == q
    assert extended(5).tokens.tolist() == whole.tokens[:5].tolist()
    sequence.sampling = SamplingParams(max_tokens=3)
    assert max(map(len, extended(64).paths())) == 2
    unverified = replace(tree, n_unverified=1)
    assert extended(64, unverified) is unverified
    path = tuple(whole.topology.path_to(chains.index("qjjjj")))
    drafted, verdict = whole.drafted(Verdict(path, k))
    assert drafted.tokens.tolist() == [0, q, z]
    assert verdict == Verdict((1,), int(whole.tokens[path[1]]))
    assert whole.drafted(Verdict((2,), k))[1] == Verdict((2,), k)


def answers(llm, temperature):
    params = SamplingParams(max_tokens=14, temperature=temperature)
    several = [replace(params, seed=i, structured_outputs=own) for i, own in enumerate(formats())]
    return llm.generate([PROMPT] * len(several), several)


@pytest.fixture(scope="module")
def plain_answers(pair):
    """Of temperatures 0 and 1."""
    with open_llm(pair.target, rule="coupled") as llm:
        return [[output.token_ids for output in answers(llm, float(i))] for i in range(2)]


def watched_trees(drafter, monkeypatch):
    """Return the paths of every tree to come; each path must lie within the grammar."""
    propose = drafter.propose
    trees = []

    def checked(sequences, n_nodes):
        proposed = propose(sequences, n_nodes)
        for sequence, tree in zip(sequences, proposed, strict=True):
            trees.append(tree.candidates().paths())
            for path in trees[-1]:
                assert END in path[:-1] or sequence.n_allowed(path) == len(path)
        return proposed

    monkeypatch.setattr(drafter, "propose", checked)
    return trees


@pytest.mark.parametrize(("drafter", "rule"), EACH_IN_ONE)
def test_answers_of_every_drafter_and_rule_stay_in_the_grammar(
    pair, compiler, plain_answers, monkeypatch, drafter, rule
):
    keep_steady(monkeypatch)
    with open_llm(pair.target, tree_size=64, **pair.settings(drafter, rule)) as llm:
        trees = watched_trees(llm.engine.drafter, monkeypatch)
        greedy, sampled = answers(llm, 0.0), answers(llm, 1.0)
    assert drafter == "none" or max(map(len, trees)) > 2
    assert [output.token_ids for output in greedy] == plain_answers[0]
    if rule == "coupled":
        assert [output.token_ids for output in sampled] == plain_answers[1]
    for output, outputs in zip([*greedy, *sampled], formats() * 2, strict=True):
        grammar = compiler.compile(outputs)
        for token in output.token_ids:
            assert token in allowed_by(grammar)
            if token != END:
                grammar.advance(token)
        if output.finish_reason == "stop" and outputs.json is not None:
            assert isinstance(json.loads(output.text), dict)


def law(compiler, model, prompt):
    """Probability of each answer under masked plain sampling, by enumeration with transformers."""
    law = {}
    paths = [((), 1.0)]
    while paths:
        path, chance = paths.pop()
        if path and path[-1] == END:
            law[path] = chance
            continue
        allowed = sorted(mask_after(compiler, path))
        row = logits_of(model, [*prompt, *path])[-1, allowed].double().softmax(-1)
        paths += [((*path, t), chance * p) for t, p in zip(allowed, row.tolist(), strict=True)]
    return law


# Of the rules with residuals one: test_drawn_trees.py enumerates all of them.
@pytest.mark.parametrize("rule", ["match", "traversal", "coupled"])
def test_sampled_answers_have_the_law_of_masked_plain_sampling(
    llm, compiler, pair, monkeypatch, rule
):
    n = 300
    prompt = llm.encode(PROMPT)
    expected = law(compiler, pair.model, prompt)
    assert sum(expected.values()) == pytest.approx(1)
    keep_steady(monkeypatch)
    outputs = StructuredOutputs(choice=CHOICES)
    params = SamplingParams(temperature=1.0, structured_outputs=outputs)
    params = [replace(params, seed=seed) for seed in range(n)]
    settings = {"drafter": "static_tree", "draft_model": str(pair.draft), "rule": rule}
    with open_llm(pair.target, max_num_seqs=8, **settings) as sampling:
        drawn = [tuple(each.token_ids) for each in sampling.generate([prompt] * n, params)]
    assert_drawn(drawn, expected, least_p=1e-3)


A = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(("schema", "is_open"), [
    (A, False),
    (A | {"additionalProperties": True}, True),
    (A | {"patternProperties": {"b": {}}}, True),
    (A | {"allOf": [{"properties": {"b": {}}}]}, True),
    ({"$ref": "#/$defs/x", "$defs": {"x": A}}, False),
    ({"anyOf": [A, {"type": "null"}]}, False),
])  # fmt: skip
def test_properties_without_a_schema_are_excluded_by_default(llm, compiler, schema, is_open):
    tokens = llm.encode('{"a": 1, "b": 2}')
    grammar = compiler.compile(StructuredOutputs(json=schema))
    named = llm.encode('{"a": 1}')
    assert grammar.n_allowed(named) == len(named)
    assert (grammar.n_allowed(tokens) == len(tokens)) == is_open


@pytest.mark.parametrize(("outputs", "message"), [
    ({"json": {"type": "foo"}}, "^json_schema: .*Invalid type"),
    ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "Unsatisfiable"),
    ({"regex": "a" * 300_000}, "^regex: .*at most 196608 characters, has 300"),
    ({"choice": [f"choice {i}" for i in range(20_000)]}, "^choice: .*at most 196608 char"),
    ({"json": {"not": {"type": "null"}}}, "Unimplemented"),
    ({"choice": ["a"], "around": "start: <no> @answer"}, "<no>"),
    ({"regex": "(a"}, "^regex: .*unclosed group"),
    ({"grammar": "start: missing"}, "^grammar: .*missing"),
])  # fmt: skip
def test_an_unsupported_grammar_is_refused(llm, outputs, message):
    with pytest.raises(SettingsError, match=message):
        llm.generate("x", SamplingParams(structured_outputs=StructuredOutputs(**outputs)))


def test_formats_are_checked():
    for outputs in ({}, {"regex": "a", "around": 1}, {"json": {}, "regex": "a"}, {"json": "{"},
                    {"json": 3}, {"regex": 3}, {"choice": [""]}):  # fmt: skip
        with pytest.raises(SettingsError):
            StructuredOutputs(**outputs)
    with pytest.raises(SettingsError, match="needs StructuredOutputs, has dict"):
        SamplingParams(structured_outputs={"regex": "a"})
    for settings in ({"min_tokens": 2}, {"ignore_eos": True}, {"bad_words": ["a"]},
                     {"bad_words_ids": [[1]]}, {"allowed_token_ids": [1]},
                     {"logit_bias": {1: -float("inf")}}):  # fmt: skip
        with pytest.raises(SettingsError, match=f"structured_outputs with {next(iter(settings))}"):
            SamplingParams(structured_outputs=StructuredOutputs(regex="a"), **settings)


def test_a_token_beyond_the_limit_of_llguidance_is_refused():
    def compiled(n):
        characters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ" * n]
        vocab = {character: i for i, character in enumerate(characters)}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(["<end>"])
        return GrammarCompiler(PreTrainedTokenizerFast(tokenizer_object=tokenizer), 258, {257})

    compiler = compiled(1024)
    grammar = compiler.compile(StructuredOutputs(regex="x| {2000}"))
    assert bits(grammar.masks_after([()]))[0, 256]
    compiler.close()
    with pytest.raises(SettingsError, match="at most 1024 bytes, has a token of 1025"):
        compiled(1025)

"""Text token by token, against the decoding of the whole; where it stops; reasoning tags."""

import json
from itertools import groupby

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jinja2 import Environment
from support.checkpoints import add_tokenizer, llama_config
from support.heads import edit_config
from support.tiny import SPOKEN, byte_level, metaspace
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from offload_rt.errors import PromptError
from offload_rt.text.detokenize import TextStream, encode, encode_chat, load_tokenizer, token_bytes
from offload_rt.text.reasoning import THINK, ReasoningSplitter

BYTE_LEVEL = byte_level()
METASPACE = metaspace()
HALF = "\ufffd"

characters = st.sampled_from("aeo t\n.,é\u0301\u200d語한👍🏽👨🇫🇷ß") | st.characters(
    exclude_categories=("Cs",), exclude_characters=HALF
)
texts = st.text(characters, min_size=1, max_size=30) | st.sampled_from(SPOKEN)


def decode(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True)


def answer_of(tokenizer, prompt, ids):
    """Return the text that ids add to the prompt, without a partial character at the end."""
    before = decode(tokenizer, prompt)
    whole = decode(tokenizer, prompt + ids)
    assert whole.startswith(before)
    return whole[len(before) :].rstrip(HALF)


def pieces_of(stream, ids):
    """The pieces of an answer up to a stop string, and the number of tokens used."""
    pieces = []
    for token in ids:
        stopped = stream.add(token)
        pieces.append(stream.take(final=stopped or len(pieces) == len(ids) - 1))
        if stopped:
            break
    return pieces, len(pieces)


def encoded(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


@given(st.sampled_from([BYTE_LEVEL, METASPACE]), texts, st.integers(1, 12))
def test_pieces_are_whole_characters_and_join_to_the_text(tokenizer, text, n_prompt):
    ids = encoded(tokenizer, SPOKEN[0] + " " + text)
    prompt = decode(tokenizer, ids[:n_prompt])
    assume(HALF not in prompt)
    stream = TextStream(tokenizer, ids[:n_prompt], ())
    pieces, _ = pieces_of(stream, ids[n_prompt:])
    assert HALF not in "".join(pieces) and "".join(pieces) == stream.text
    assert prompt + stream.text == SPOKEN[0] + " " + text


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), min_size=1, max_size=30))
def test_invalid_bytes_lose_no_valid_characters(ids):
    """Random models produce such bytes; only a partial character at the very end is dropped."""
    prompt = encoded(BYTE_LEVEL, "the end ")
    stream = TextStream(BYTE_LEVEL, prompt, ())
    pieces, _ = pieces_of(stream, ids)
    assert "".join(pieces) == stream.text == answer_of(BYTE_LEVEL, prompt, ids)
    # Of byte fallback: `tokenizers.decoders.DecodeStream` raises at most of these ids.
    stream = TextStream(METASPACE, encoded(METASPACE, "the end "), ())
    pieces, n = pieces_of(stream, [id % METASPACE.get_vocab_size() for id in ids])
    assert n == len(ids) and "".join(pieces) == stream.text


def test_tokens_and_prompts_that_end_within_a_character():
    ids = encoded(BYTE_LEVEL, "smiles 🙂 waves")
    cuts = [n for n in range(1, len(ids)) if decode(BYTE_LEVEL, ids[:n]).endswith(HALF)]
    # The token of a space and the first bytes of a smile, which byte-level tokenizers have.
    assert decode(BYTE_LEVEL, [ids[cuts[0] - 1]]).startswith(" "), "not of the kind of this test"
    stream = TextStream(BYTE_LEVEL, [0], (" ",))
    assert [*map(stream.add, ids[: cuts[0]])] == [False] * (cuts[0] - 1) + [True]
    assert stream.take(final=True) == "smiles"
    texts = {"".join(pieces_of(TextStream(BYTE_LEVEL, ids[:n], ()), ids[n:])[0]) for n in cuts}
    assert texts == {"🙂 waves"}


def expected_stop(tokenizer, prompt, ids, stops):
    """Brute force: the tokens before the first stop string, and the text before the leftmost."""
    for n in range(1, len(ids) + 1):
        text = answer_of(tokenizer, prompt, ids[:n])
        positions = [text.find(stop) for stop in stops if stop in text]
        if positions:
            return n, text[: min(positions)]
    return len(ids), answer_of(tokenizer, prompt, ids)


@given(st.sampled_from([BYTE_LEVEL, METASPACE]), texts, st.data())
def test_first_stop_string_ends_the_text(tokenizer, text, data):
    """Several stops, within tokens and across borders, some absent and some nearly present."""
    prompt = encoded(tokenizer, SPOKEN[0])
    ids = encoded(tokenizer, SPOKEN[0] + " " + text * 2)[len(prompt) :]
    starts = st.integers(0, 2 * len(text))
    parts = st.tuples(starts, st.integers(1, 7), st.sampled_from(["", "", "#"]))
    stops = [
        (" " + text * 2)[start : start + length] + end
        for start, length, end in data.draw(st.lists(parts, max_size=3))
    ]
    stream = TextStream(tokenizer, prompt, tuple(stops))
    pieces, n = pieces_of(stream, ids)
    n_expected, text_expected = expected_stop(tokenizer, prompt, ids, stops)
    assert (n, stream.text, "".join(pieces)) == (n_expected, text_expected, text_expected)


@given(texts, st.lists(st.text(characters, min_size=1, max_size=6), max_size=1))
def test_only_partial_characters_and_possible_stop_prefixes_are_held_back(text, stops):
    ids = encoded(BYTE_LEVEL, text)
    stream = TextStream(BYTE_LEVEL, [0], tuple(stops))
    taken = ""
    for n, token in enumerate(ids, 1):
        if stream.add(token):
            break
        taken += stream.take()
        so_far = decode(BYTE_LEVEL, ids[:n]).rstrip(HALF)
        n_held = len(so_far) - len(taken)
        assert so_far.startswith(taken) and n_held < max(map(len, stops), default=1)
    assert taken + stream.take(final=True) == stream.text
    assert stream.take(final=True) == ""


def test_special_tokens_begin_prompts_and_have_no_text(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    start, end = (tokenizer.token_to_id(name) for name in ("<s>", "</s>"))
    ids = encoded(tokenizer, "the fox")
    stream = TextStream(tokenizer, [start], ("</s>",))
    pieces, _ = pieces_of(stream, [*ids[:2], end, *ids[2:], end])
    assert "".join(pieces) == "the fox"
    special = [("<s>", start)]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=special)
    add_tokenizer(tmp_path, tokenizer)
    assert encode(load_tokenizer(tmp_path), "the fox") == [start, *ids]


@given(texts)
def test_bytes_of_tokens_join_to_the_text(text):
    """Also where a token holds a part of a character, raw in tokens of byte fallback."""
    for raw, ids, expected in (
        (BYTE_LEVEL, encoded(BYTE_LEVEL, text + "🙂"), text + "🙂"),
        (METASPACE, encoded(METASPACE, "🙂")[-4:], "🙂"),
    ):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
        assert b"".join(token_bytes(tokenizer, token) for token in ids) == expected.encode()


@pytest.mark.parametrize("backend", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
def test_special_tokens_in_messages_are_encoded_as_text(backend, tmp_path):
    """Markers such as <think> stay tokens everywhere."""
    raw = Tokenizer.from_str(backend.to_str())
    raw.add_special_tokens(["</s>"])
    raw.add_tokens(["<think>"])
    add_tokenizer(tmp_path, raw)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = (
        "{% for m in messages %}</s><think>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} answer:{% endif %}"
    )
    turns = [{"role": "user", "content": text} for text in ("fox", "the </s> fox", "<think></s>")]
    ids = encode_chat(tokenizer, turns, {})
    assert [ids.count(raw.token_to_id(name)) for name in ("</s>", "<think>")] == [3, 4]
    options = {"add_generation_prompt": True}
    rendered = tokenizer.apply_chat_template(turns[:1], return_dict=False, **options)
    assert encode_chat(tokenizer, turns[:1], options) == rendered


def test_chat_templates_may_change_lists(tmp_path):
    """As without the sandbox of transformers, which refuses these statements."""
    template = (
        "{%- set q = namespace(ids=[]) -%}{% for m in messages %}\n"
        "{%- if m.role == 'user' -%}{%- set _ = q.ids.append(m.content) -%}\n"
        "{% elif q.ids %}{% set first=q.ids.pop(0) %} {{ first }},{{ q.ids | length }}\n"
        "{%- endif -%}{% endfor %}"
    )
    turns = [{"role": "user", "content": text} for text in "ab"] + [{"role": "tool"}] * 3
    expected = Environment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    add_tokenizer(tmp_path, BYTE_LEVEL)
    edit_config(tmp_path, "tokenizer_config.json", chat_template=template)
    tokenizer = load_tokenizer(tmp_path)
    rendered = tokenizer.apply_chat_template(turns, tokenize=False)
    assert rendered == expected.render(messages=turns)
    assert "a,1" in rendered and "b,0" in rendered


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "no_such_model"])
@pytest.mark.parametrize("named", [
    "TokenizersBackend", "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast",
    "Qwen2Tokenizer", None,
])  # fmt: skip
def test_tokenizer_class_equals_transformers(tmp_path, kind, named):
    add_tokenizer(tmp_path, BYTE_LEVEL)
    (tmp_path / "config.json").write_text(json.dumps(llama_config(model_type=kind)))
    edit_config(tmp_path, "tokenizer_config.json", tokenizer_class=named)
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert type(ours) is type(theirs)
    ids = theirs.encode("The quick  brown fox, naïve\n")
    assert ours.encode("The quick  brown fox, naïve\n") == ids
    assert ours.decode(ids) == theirs.decode(ids)


def test_missing_failing_or_unsafe_template_is_one_sentence(tmp_path):
    add_tokenizer(tmp_path, BYTE_LEVEL)
    tokenizer = load_tokenizer(tmp_path)
    for template, said in (
        (None, "template"),
        ("{{ raise_exception('no\nsystem turn') }}", "no system turn"),
        ("{{ raise_exception('x' * 99999) }}", "xxx"),
        ("{% for %}", "Expected"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception.__globals__['os'].system('true') }}", "unsafe|undefined"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ):
        tokenizer.chat_template = template
        with pytest.raises(PromptError, match=said) as caught:
            encode_chat(tokenizer, [{"role": "user", "content": "hello"}], {})
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


REASONING = [
    ("<think>\nfirst\n</think>\n\nanswer", False, [("first\n", True), ("answer", False)]),
    ("in the template</think>answer", True, [("in the template", True), ("answer", False)]),
    ("no tags < think", False, [("no tags < think", False)]),
    (" <think>b</think>c<think>d", False, [("b", True), ("c<think>d", False)]),
    ("a <think>b</think>", False, [("a <think>b</think>", False)]),
    ("\n a", False, [("\n a", False)]),
    ("cut off <thi", False, [("cut off <thi", False)]),
    ("", False, []),
]


def joined(pieces: list[str], starts_inside: bool) -> list[tuple[str, bool]]:
    splitter = ReasoningSplitter(starts_inside)
    parts = [part for text in pieces[:-1] for part in splitter.add(text)]
    parts += splitter.add(pieces[-1], is_last=True)
    runs = groupby(parts, key=lambda part: part.is_reasoning)
    return [("".join(part.text for part in run), kind) for kind, run in runs]


@pytest.mark.parametrize(("text", "starts_inside", "expected"), REASONING)
def test_parts_do_not_depend_on_the_pieces(text, starts_inside, expected):
    for size in range(1, len(text) + 1):
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        assert joined(pieces, starts_inside) == expected


def test_text_is_returned_as_soon_as_no_tag_can_follow():
    splitter = ReasoningSplitter()
    pieces = {"\n<th": [], "ink>a <": ["a "], "b": ["<b"], "</think>c <": ["c <"]}
    for piece, parts in pieces.items():
        assert [part.text for part in splitter.add(piece)] == parts
    assert THINK.opens("<|assistant|>\n<think>\n")
    assert not THINK.opens("<think>\n\n</think>\n\n")
    assert THINK.closes("<think>\n\n</think>\n\n")

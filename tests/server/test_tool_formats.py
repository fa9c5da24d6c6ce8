"""Formats of tool calls and reasoning: parsers, grammars, and their selection."""

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from check_templates import CASES, failures, rendered, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.chat_templates import TEMPLATES, template
from support.serving import MODELS
from tokenizers import AddedToken
from transformers import AutoTokenizer

from offload_rt import StructuredOutputs
from offload_rt.errors import SettingsError
from offload_rt.executor.grammar import GrammarCompiler
from offload_rt.server.call_format import Parsed
from offload_rt.server.call_grammar import call_grammar
from offload_rt.server.call_parser import CallParser, parser_of
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.tool_formats.hermes import FORMAT as HERMES
from offload_rt.system import registry

FUNCTIONS = [
    {"name": "open_file", "parameters": {
        "properties": {"path": {"type": "string"}, "mode": {"enum": ["r", "w"]},
                       "size": {"$ref": "#/$defs/size"}},
        "required": ["path", "size"], "additionalProperties": False,
        "$defs": {"size": {"type": "integer"}}}},
    {"name": "add", "parameters": {}},
]  # fmt: skip
SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "<|channel|>", "<|message|>",
           "<|start|>", "<|end|>", "<|constrain|>")  # fmt: skip
ADDED = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
         "<think>", "</think>")  # fmt: skip
OPEN_FILE = {"path": 'a}b"\n', "size": 3}
CALLS = [("open_file", OPEN_FILE), ("add", {})]
HARMONY = "<|channel|>commentary to=functions.open_file <|constrain|>json<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Tokenizer with the markers of all formats."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "demo-target")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED])
    return tokenizer


def chat_format_of(tokenizer: Any, name: str, reasoning: str = "auto") -> ChatFormat:
    """Derive the format of a template, or find a format of the folder, like harmony and HERMES."""
    tokenizer.chat_template = TEMPLATES.get(name)
    return ChatFormat.select(tokenizer, "auto" if name in TEMPLATES else name.lower(), reasoning)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> Iterator[GrammarCompiler]:
    """Compiler for this tokenizer, with end token 0."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), {0})
    yield compiler
    compiler.close()


def accepted(compiler, tokenizer, outputs, text):
    tokens = [*tokenizer.encode(text, add_special_tokens=False), 0]
    return compiler.compile(outputs).n_allowed(tokens) == len(tokens)


def calls_of(chat_format, is_single=True, around=None):
    lark = call_grammar(chat_format.tool_format, FUNCTIONS, chat_format.lark, is_single)
    return StructuredOutputs(grammar=lark, around=around)


def answer_of(tokenizer: Any, name: str, n_calls: int) -> str:
    if name == "harmony":
        return HARMONY + json.dumps(OPEN_FILE)
    form = chat_format_of(tokenizer, name).tool_format
    if name not in TEMPLATES:
        return form.render(CALLS[:n_calls])
    return rendered(tokenizer, CALLS[:n_calls], form).removesuffix("<|im_end|>\n")


@pytest.mark.parametrize("name", [*TEMPLATES, "harmony", "HERMES", "GRANITE", "LFM2", "GENERIC"])
def test_grammar_and_parser_of_a_format_agree(compiler, tokenizer, name):
    """The grammar accepts rendered calls, and a call only once if that is required."""
    n_calls = 1 if name in ("llama", "harmony") else 2
    # The grammar leaves ids in JSON to the server.
    answers = (answer_of(tokenizer, name, n) for n in (1, n_calls))
    single, text = (re.sub(r', "id": "\w+"', "", answer) for answer in answers)
    chat_format = chat_format_of(tokenizer, name)
    for is_single, expected in ((True, single), (False, text)):
        outputs = calls_of(chat_format, is_single, chat_format.around("", True))
        assert accepted(compiler, tokenizer, outputs, expected)
        for wrong in (text.replace("open_file", "close_file"), text.replace("3", "true"), "Hello"):
            assert not accepted(compiler, tokenizer, outputs, wrong)
    if name == "numbered":  # small models write digits without end
        outputs = calls_of(chat_format)
        assert accepted(compiler, tokenizer, outputs, single.replace(":0", ":987"))
        assert not accepted(compiler, tokenizer, outputs, single.replace(":0", ":9876"))
    assert n_calls == 1 or not accepted(compiler, tokenizer, calls_of(chat_format), text)
    assert parsed(chat_format, text) == ("", "", CALLS[:n_calls])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("case", CASES)
def test_rendered_calls_survive_every_split(name, case):
    """Truncated answers have no wrong calls."""
    tokenizer = tokenizer_of(TEMPLATES[name])
    chat_format = ChatFormat.select(tokenizer, "auto", "auto")
    assert chat_format.tool_format != registry.find("server.tool_formats", "generic").FORMAT
    assert failures(tokenizer, chat_format, [case]) == []


def parsed(chat_format: ChatFormat, text: str, tail: str = "") -> tuple[str, str, list[Any]]:
    """Parse a text in pieces of several sizes. Returns reasoning, content and calls."""
    results = set()
    for size in (1, 3, 7, len(text)) if len(text) < 1000 else (1000, len(text)):
        schemas = {str(entry["name"]): entry["parameters"] for entry in FUNCTIONS}
        parser = chat_format.parser(schemas, tail)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        whole = Parsed.join([*map(parser.feed, pieces), parser.feed("", True)])
        calls = [call["function"] for call in whole.calls]
        assert all(call["arguments"].encode() for call in calls)  # responses are UTF-8
        results.add((whole.reasoning, whole.text, json.dumps(calls)))
    ((reasoning, content, calls),) = results
    named = [(call["name"], json.loads(call["arguments"])) for call in json.loads(calls)]
    return reasoning, content, named


def call(arguments: str, name: str = "add", close: str = "</tool_call>") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n{close}'


def test_tool_parser_reports_complete_calls_and_does_not_match_each_piece(monkeypatch):
    """A long call is matched again only behind a closing tag."""
    parser = CallParser(HERMES, {"add": {}})
    assert len(parser.feed("Yes. " + call("{}")).calls) == 1
    assert parser.feed(" More.").text == "More."
    match = Mock(side_effect=parser._match)
    monkeypatch.setattr(parser, "_match", match)
    parser.feed('<tool_call>{"name": "add", "arguments": {"a": "</tool_call>' + " x" * 200)
    for _ in range(2000):
        parser.feed(" x")
    assert parser.feed('"}}</tool_call>').calls and match.call_count < 5


@pytest.mark.parametrize(("name", "call_id"), [
    ("hermes", "call_1"), ("mistral_list", "[0-9a-f]{9}"), ("named_ids", "functions.add:0"),
    ("hidden_tools", "call_1"),
])  # fmt: skip
def test_messages_are_adapted_to_the_template(name, call_id):
    """Ids of results follow those of calls, and hidden tools are described."""
    form: Any = ChatFormat.select(tokenizer_of(TEMPLATES[name]), "auto", "auto").tool_format
    function = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": "call_1", "function": function}]
    user = {"role": "user", "content": "Hi"}
    turns = [
        user, {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]  # fmt: skip
    *system, first, answer, result = form.adapt(turns, [{"function": {"name": "add"}}])[0]
    assert first == user and len(system) == (name == "hidden_tools")
    assert all(turn["role"] == "system" and '"name": "add"' in turn["content"] for turn in system)
    (call,) = answer["tool_calls"]
    assert call["id"] == result["tool_call_id"] and re.fullmatch(call_id, call["id"])
    assert call["function"] == function and calls[0]["id"] == "call_1"  # a copy


FORMS = {
    name: ChatFormat.select(tokenizer_of(text), "auto", "auto").tool_format
    for name, text in TEMPLATES.items()
} | {
    name: registry.find("server.tool_formats", name).FORMAT
    for name in ("granite", "lfm2", "harmony", "generic")
}
# Texts between tags have no quotation marks: an argument with the text of a tag is ambiguous.
TEXTS = {False: st.text(), True: st.text("ab1é \n\t{}[]:;,.\\-", max_size=20)}
WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    """Build JSON values, with NaN and Inf excluded."""
    inner = st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | texts
    return st.recursive(
        inner, lambda part: st.lists(part, max_size=3) | st.dictionaries(WORDS, part, max_size=3),
        max_leaves=10,
    )  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_random_calls_survive_random_splits(name, data):
    """Any tools and arguments, with content before the calls, in any pieces, also truncated."""
    form: Any = FORMS[name]
    texts = TEXTS[form.pairs is not None]
    names = data.draw(st.lists(WORDS, min_size=1, max_size=3, unique=True))
    n_calls = 1 if form.between is None else data.draw(st.integers(1, 3))
    calls = []
    schemas: dict[str, Any] = {each: {"properties": {}} for each in names}
    for _ in range(n_calls):
        called = data.draw(st.sampled_from(names))
        arguments = data.draw(st.dictionaries(WORDS, values(texts), max_size=3))
        calls.append((called, arguments))
        for key in [*arguments]:  # a key of the schema is always a text
            if isinstance(arguments[key], str):
                arguments[f"text_{key}"] = arguments.pop(key)
        texts_of = {key: {"type": "string"} for key in arguments if key.startswith("text_")}
        schemas[called]["properties"] |= texts_of
    text = form.render(calls)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    for n, given_pieces in ((len(calls), pieces), (None, pieces[:-1])):
        parser = parser_of(form, schemas)
        whole = Parsed.join([*map(parser.feed, given_pieces), parser.feed("", True)])
        found = [call["function"] for call in whole.calls]
        result = [(call["name"], json.loads(call["arguments"])) for call in found]
        assert result == calls[: len(result)]
        assert n is None or (n, "") == (len(result), whole.text)


@pytest.mark.parametrize(("name", "text", "content", "arguments"), [
    *(("HERMES", *case) for case in (
        (f"Well. {call('{}')}", "Well. ", [{}]), (f"{call('{}')} and so on", "and so on", [{}]),
        (f"{call('{}')}\n{call('{}')}\n", "", [{}, {}]), (call("null"), "", [{}]),
        (call('{"a": "</tool_call>"}'), "", [{"a": "</tool_call>"}]),
        (call('{"a": "<tool_call>"}') + " x", "x", [{"a": "<tool_call>"}]),
        (call('"{\\"a\\": 1}"'), "", [{"a": 1}]), (call('{"a": 1}', close=""), "", [{"a": 1}]),
        (call('{"a": "two\nlines"}'), "", [{"a": "two\nlines"}]),
        (call('{"a": "\\ud800é"}'), "", [{"a": "\ud800é"}]),
        (call('{"a": 1}', close="</tool_"), "", [{"a": 1}]),
        (call("{}") + "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", [{}]))),
    *(("HERMES", text, None, []) for text in (
        call("{}", name="other"), call("[1]"), call('"text"'), call('{"a": NaN}'),
        "<tool_call>" + "[" * 100_000, '<tool_call>{"a": "', "<tool_call></tool_call>")),
    ("llama", 'Use {"name": "add", "parameters": {}}', None, []),
    ("llama", '{"name": "other", "parameters": {}} {"name": "add"}', None, []),
    ("llama", '\n{"name": "add", "parameters": {}} ', "", [{}]),
    ("llama", '{"name": "add", "parameters": {}} and more', "and more", [{}]),
    ("llama", '{"name": "ad', None, []), ("llama", " \n", None, []),
    ("mistral_list", 'So: [TOOL_CALLS] [{"name": "add", "arguments": {"a": "]"}}]', "So: ",
     [{"a": "]"}]),
    ("mistral_ids", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": [1, {"b": "\\"}"}]}', "",
     [{"a": [1, {"b": '"}'}]}]),
    ("mistral_list", '[TOOL_CALLS][{"name": "add"}, {"name": "other"}]',
     ', {"name": "other"}]', [{}]),
    ("python", "<|tool_call_start|>[other()]<|tool_call_end|>", None, []),
    ("recipient", "all\n>>>add\n{}", "all\n", [{}]),
    ("mistral", "[TOOL_CALLS]add", None, []), ("mistral", "[TOOL", None, []),
    ("qwen3_coder", "<tool_call><function=add><parameter=a></function></tool_call>", None, []),
    ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n</tool_call>\n</parameter>\n"
     "</function>\n</tool_call>", "", [{"a": "</tool_call>"}]),
    ("qwen3_coder", "<tool_call>\nadd\n</tool_call>", None, []),
    ("glm45", "<tool_call>add<arg_key>a</arg_key>"
     "<arg_value></tool_call></arg_value></tool_call>", "", [{"a": "</tool_call>"}]),
    ("glm45", "<tool_call>add<arg_key>a</arg_key></arg_value></tool_call>", None, []),
    ("glm45", "<tool_call>other</tool_call>", None, []),
    ("harmony", "plain text", None, []), ("harmony", "<|chan", "", []),
    ("harmony", "<|channel|>final<|message|>a <|en", "a <|en", []),
    ("harmony", "<|channel|>commentary<|message|>So<|end|><|start|>assistant to=functions.add"
     "<|channel|>commentary json<|message|>{}", "So", [{}]),
    ("harmony", "<|channel|>commentary to=functions.other<|message|>{}", "{}", []),
    ("harmony", "<|channel|>commentary to=functions.add<|message|>{", "{", []),
])  # fmt: skip
def test_text_beside_calls_is_content(tokenizer, name, text, content, arguments):
    """A content of None is the whole text."""
    calls = [("add", values) for values in arguments]
    expected = ("", text if content is None else content, calls)
    assert parsed(chat_format_of(tokenizer, name), text) == expected


def test_arguments_between_tags_have_the_type_of_the_schema(tokenizer):
    chat_format = chat_format_of(tokenizer, "glm45", "none")
    for text, value in (
        ("3", 3), ("true", True), ("null", None), ('"a"', "a"), ("a", "a"), ("[1, 2", "[1, 2"),
        ('{"a": 1}', {"a": 1}),
    ):  # fmt: skip
        for name, expected in (("path", text), ("size", value)):
            pair = f"<arg_key>{name}</arg_key><arg_value>{text}</arg_value>"
            (call,) = parsed(chat_format, f"<tool_call>open_file{pair}</tool_call>")[2]
            assert call[1] == {name: expected}


@pytest.mark.parametrize(("name", "reasoning", "tail", "text"), [
    ("hermes", "think", "", "<think>hm</think>yes"), ("hermes", "think", "", "yes"),
    ("hermes", "think", "<think>\n", "hm</think>yes"),
    ("hermes", "think", "</think>\n\n", "yes"), ("hermes", "none", "", "yes"),
    ("mistral", "mistral", "", "[THINK]hm[/THINK]yes"),
    ("harmony", "auto", "", ANALYSIS + "<|channel|>final<|message|>yes"),
    ("harmony", "auto", "", "<|channel|>final<|message|>yes"),
])  # fmt: skip
def test_grammar_begins_behind_the_reasoning(compiler, tokenizer, name, reasoning, tail, text):
    chat_format = chat_format_of(tokenizer, name, reasoning)
    assert chat_format.needs_special == (name != "hermes")
    outputs = StructuredOutputs(choice=["yes", "no"], around=chat_format.around(tail, False))
    assert accepted(compiler, tokenizer, outputs, text)
    assert not accepted(compiler, tokenizer, outputs, text.replace("yes", "maybe"))
    thought = "hm" if "hm" in text else ""
    assert parsed(chat_format, text, tail) == (thought, "yes", [])
    if name == "harmony":
        plain = chat_format_of(tokenizer, name, "none")
        assert parsed(plain, text) == ("", f"{thought}yes", [])
    outputs = calls_of(chat_format, around=chat_format.around(tail, True))
    text = text.replace("yes", "").replace("<|channel|>final<|message|>", "")
    text += answer_of(tokenizer, name, 1)
    assert accepted(compiler, tokenizer, outputs, text)
    assert parsed(chat_format, text, tail) == (thought, "", [("open_file", OPEN_FILE)])


@pytest.mark.parametrize(("text", "tags"), [
    ("<seed:think>{{ m.reasoning_content }}</seed:think>{{ m.content }}", "<seed:think>"),
    ("{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content }}", "[THINK]"),
    ("{{ m.content }}", None),
    ("{{ '<|m|>' ~ m.thinking ~ '<|e|>' if m.thinking }}<|m|>{{ m.content }}", None),
])  # fmt: skip
def test_reasoning_tags_are_derived(text, tags):
    chat_format = ChatFormat.select(tokenizer_of(template("", text=text)), "auto", "auto")
    assert (chat_format.tags and chat_format.tags.opening) == tags


@pytest.mark.parametrize(("template", "name", "reasoning"), [
    ("{{ '<tool_call>' if tools }}", "hermes", "none"),
    ("{{ '<tool_call>' if tools }} {{ '</think>' }}", "hermes", "think"),
    ("{{ '<|tool_call|>' if tools }}", "granite", "none"),
    ("{{ '<|tool_list_start|>' if tools }}", "lfm2", "none"),
    ("{{ '<|channel|>' }} {{ '<|message|>' }}", "harmony", "harmony"),
    ("{{ tools }} {{ '[/THINK]' }}", "generic", "mistral"),
    ("{{ messages.missing.text }}", "generic", "none"),
])  # fmt: skip
def test_formats_without_rendered_calls_follow_marks(template, name, reasoning):
    chat_format = ChatFormat.select(tokenizer_of(template), "auto", "auto")
    assert chat_format.tool_format.name == name
    assert chat_format == ChatFormat.select(chat_format.tokenizer, name, reasoning)
    assert chat_format.is_unknown == ("tools }}" in template)


def test_defects_of_the_derivation_are_not_hidden(monkeypatch):
    """Only failures of the template lead to the generic format."""
    broken = tokenizer_of("{{ 1 // 0 if tools }}")
    assert ChatFormat.select(broken, "auto", "auto").tool_format.name == "generic"
    monkeypatch.delattr("offload_rt.server.derivation._split_json")
    with pytest.raises(NameError):
        ChatFormat.select(tokenizer_of(TEMPLATES["hermes"]), "auto", "auto")


def test_unknown_and_contradictory_parsers_are_refused(tokenizer):
    for tools, reasoning, word in (
        ("json", "auto", "'json'"), ("hermes", "gpt", "none"), ("hermes", "harmony", "think"),
        ("harmony", "think", "harmony"),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=word):
            ChatFormat.select(tokenizer, tools, reasoning)

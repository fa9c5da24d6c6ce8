"""Derive the format of tool calls of each chat template in a folder, and parse calls back.

    python scripts/check_templates.py FOLDER

Prints the Markdown table of docs/server.md, and how many templates parse their own calls in every
split of the text and never find wrong calls in truncated text.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from offload_rt.server.call_format import CallFormat
from offload_rt.server.chat_format import ChatFormat
from offload_rt.server.derivation import renderer, tool_variables
from offload_rt.text.detokenize import without_mutation

TURN = {"role": "user", "content": "Which weather?"}
TEXT = {"type": "string", "description": "A text"}
NUMBER = {"type": "integer", "description": "A number"}
SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": TEXT}},
    "add": {"type": "object", "properties": {"a": NUMBER, "b": {"description": "Anything"}}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
Calls = list[tuple[str, Any]]
CASES: dict[str, Calls] = {
    "texts": [("get_weather", {"city": 'São  Paulo\n<b> [x] {y: 1}, (z) \\n "q"'})],
    "numbers": [("add", {"a": -3, "b": 0.5})],
    "constants": [("add", {"a": None, "b": True})],
    "nested": [("add", {"a": 1, "b": {"k": ["v, w", {"x": 1}], "l": None}})],
    "no arguments": [("add", {})],
    "two calls": [("get_weather", {"city": "Oslo"}), ("add", {"a": 1, "b": 2})],
}


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """Build a tokenizer with a chat template and without a vocabulary."""
    words = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = without_mutation(template)
    return tokenizer


def calls_of(calls: Calls) -> list[Any]:
    """Convert calls to OpenAI's format."""
    functions = [{"name": name, "arguments": value} for name, value in calls]
    ids = [f"call_long_{i}" for i in range(len(calls))]
    return [
        {"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)
    ]


def rendered(tokenizer: Any, calls: Calls, form: Any) -> str:
    """Render an answer with calls, behind the prompt of the answer."""
    answer = {"role": "assistant", "content": "", "tool_calls": calls_of(calls)}
    texts = []
    for turns in ([TURN, answer], [TURN]):
        adapted, tools = form.adapt(turns, TOOLS)
        options = {"tokenize": False, "add_generation_prompt": len(turns) == 1}
        options |= tool_variables(tokenizer.chat_template, tools)
        text = str(tokenizer.apply_chat_template(adapted, **options))
        texts.append(text.rpartition(TURN["content"])[2])
    return texts[0].removeprefix(texts[1])


def parsed(chat_format: ChatFormat, pieces: list[str], tail: str = "") -> Calls:
    """Parse pieces of an answer."""
    parser = chat_format.parser(SCHEMAS, tail)
    parts = [*map(parser.feed, pieces), parser.feed("", True)]
    calls = [call["function"] for part in parts for call in part.calls]
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


def splits(text: str) -> Iterator[list[str]]:
    """Split a text into characters, and at each position into two pieces."""
    yield [*text]
    for i in range(len(text) + 1):
        yield [text[:i], text[i:]]


def failures(tokenizer: Any, chat_format: ChatFormat, cases: Iterable[str] = CASES) -> list[str]:
    """Return the cases whose calls do not survive."""
    failed = []
    for case in cases:
        calls = CASES[case]
        try:
            text = rendered(tokenizer, calls, chat_format.tool_format)
        except Exception:  # templates are programs
            if case != "two calls":
                failed.append(case)
            continue
        is_shown = all(name in text for name, _ in calls)
        expected = calls if is_shown else calls[:1]
        if not any(word in text for word in ("null", "None")):
            expected = without_null(expected)
        if any(parsed(chat_format, pieces) != expected for pieces in splits(text)):
            failed.append(case)
        starts = (parsed(chat_format, [text[:i]]) for i in range(len(text)))
        if any(start != expected[: len(start)] for start in starts):
            failed.append(f"{case}, truncated")
    return failed


def without_null(value: Any) -> Any:
    """Remove what a template omits that renders no null."""
    if isinstance(value, dict):
        return {key: without_null(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return type(value)(map(without_null, value))
    return value


def described(form: Any) -> str:
    """Describe a format by a call of f with argument k."""
    if not isinstance(form, CallFormat):
        return "a message to `functions.f`"
    arguments = {"k": "v"} if form.pairs else {}
    text = form.render([("f", arguments)]).replace("{}", "{...}", form.pairs is None)
    text = " ".join(text.split()).replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def reason(tokenizer: Any) -> str:
    """Return why a template has no derived format."""
    answer = {"role": "assistant", "content": "", "tool_calls": calls_of(CASES["no arguments"])}
    try:
        renderer(tokenizer)([TURN, answer], TOOLS, False)
    except TemplateError as error:
        return f"the template fails: {' '.join(str(error).split())[:70]}"
    return "the template renders no calls"


def main(folder: str) -> int:
    """Check all templates."""
    paths = sorted(Path(folder).glob("*.jinja"))
    passed: Counter[str] = Counter()
    print("| template | format | a call | remarks |\n|---|---|---|---|")
    for path in paths:
        tokenizer = tokenizer_of(path.read_text())
        chat_format = ChatFormat.select(tokenizer, "auto", "auto")
        form = chat_format.tool_format
        failed = failures(tokenizer, chat_format)
        passed[form.name] += not failed
        remarks = [] if form.name in ("derived", "harmony") else [reason(tokenizer)]
        remarks += [f"not parsed: {', '.join(failed)}"] if failed else []
        print(f"| {path.stem} | {form.name} | {described(form)} | {'; '.join(remarks)} |")
    counts = ", ".join(f"{n} {name}" for name, n in passed.most_common())
    print(f"\n{passed.total()} of {len(paths)} parse their own calls: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

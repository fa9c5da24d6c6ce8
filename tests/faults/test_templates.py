"""Chat templates that mean harm, or are none: each ends in one sentence, soon, and reaches nothing."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_command_line import PROMPT

from faults.counting import Count
from faults.process import Job, judge
from offload_rt.errors import CheckpointError, PromptError
from offload_rt.text.detokenize import chat, encode, load_tokenizer

ENDLESS = {
    "nested loops": "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "power": "{{ 10 ** (10 ** 9) }}",
    "long text": "{{ 'x' * 10 ** 11 }}",
    "doubling": "{% set n = namespace(t='x' * 1000) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t }}",
    "growing": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].content }}{% endfor %}{% endfor %}",
    "format": "{{ '%1000000000000s' % 'x' }}",
    "format filter": "{{ '%9999999999s' | format('x') }}",
    "width": "{{ '{:>99999999999}'.format('x') }}",
    "center": "{{ 'x' | center(99999999999) }}",
    "list": "{{ [0] * 10 ** 12 }}",
    "lipsum": "{{ lipsum(n=10 ** 9) }}",
    "join": "{% for i in range(99999) %}{{ range(99999) | list | join(',') }}{% endfor %}",
    "sort": "{% for i in range(99999) %}{{ range(99999) | sort(reverse=true) | first }}{% endfor %}",
    "recursion of macros": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "slow search": "{% for i in range(99999) %}{{ ('a' * 99999).count('aa') }}{% endfor %}",
}  # fmt: skip
FORBIDDEN = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['os'].system('touch PLACE') }}",
    "lipsum globals": "{{ lipsum.__globals__['os'].system('touch PLACE') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('touch PLACE') }}",
    "attr": "{{ ''|attr('__class__')|attr('__mro__') }}",
    "format string": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "format map": "{{ '{m.__class__}'.format_map({'m': messages}) }}",
    "mutation": "{{ messages.append(1) }}",
    "namespace": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "huge range": "{{ range(10 ** 9) | list }}",
    "exception": "{{ raise_exception('a\\nb' + 'x' * 99999) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "syntax": "{% for %}",
    "unknown tag": "{% frobnicate %}",
    "unclosed": "{% if true %}",
    "unknown filter": "{{ 1 | frobnicate }}",
    "undefined": "{{ nothing.at.all }}",
    "division": "{{ 1 / 0 }}",
    "deep brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "deep blocks": "{% if 1 %}" * 500 + "{% endif %}" * 500,
    "long chain": "{{ 1" + " + 1" * 50_000 + " }}",
    "long attribute": "{{ x" + ".a" * 20_000 + " }}",
}  # fmt: skip
NO_TEXT: tuple[Any, ...] = (
    5,
    True,
    1.5,
    [],
    {},
    ["x"],
    [{"name": "a"}],
    [{"name": "default", "template": 7}],
    {"default": 3},
    [1, 2],
)


@pytest.fixture
def directory(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "m"))


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _give(directory: Path, template: Any) -> Path:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return directory


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_template_that_is_wrong_or_forbidden_is_one_sentence_and_reaches_nothing(
    name: str, directory: Path, faults: Count
) -> None:
    tokenizer = load_tokenizer(_give(directory, FORBIDDEN[name].replace("PLACE", str(directory / "reached"))))
    with faults.one():
        try:
            text = tokenizer.decode(encode(tokenizer, PROMPT, chat=True))
        except PromptError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
        else:
            assert name in ("attr", "deep blocks", "format string", "format map") and "class" not in text, text
        assert not (directory / "reached").exists()


@pytest.mark.parametrize("template", NO_TEXT, ids=repr)
def test_a_template_that_is_no_text(template: Any, directory: Path, faults: Count) -> None:
    with faults.one(), pytest.raises((PromptError, CheckpointError)):
        encode(load_tokenizer(_give(directory, template)), PROMPT, chat=True)


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_without_end_is_stopped(
    name: str, directory: Path, faults: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_CPU_S", 1)
    tokenizer, started, before = load_tokenizer(_give(directory, ENDLESS[name])), time.perf_counter(), _children()
    with faults.one():
        with pytest.raises(PromptError, match="chat template failed"):
            encode(tokenizer, PROMPT, chat=True)
        assert time.perf_counter() - started < 30
        assert _children() == before


def test_a_child_that_stands_still_is_not_waited_for(
    directory: Path, faults: Count, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "_PATIENCE_S", 0.2)
    before = _children()
    with faults.one():
        assert chat._limited(lambda: time.sleep(60))[0] == ""
        assert _children() == before


def test_a_sound_template_gives_what_transformers_gives(directory: Path) -> None:
    template = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content | trim }}{% endfor %}"
    template += "{% if add_generation_prompt %}<a>{% endif %}"
    tokenizer = load_tokenizer(_give(directory, template))
    turns = [{"role": "user", "content": PROMPT}]
    wanted = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert encode(tokenizer, PROMPT, chat=True) == list(wanted)
    assert tokenizer.decode(wanted) == f"<user>{PROMPT}<a>"


def test_the_same_through_the_command_line(
    model: Path, tmp_path: Path, folder: Callable[[], Path], run_all: Any, faults: Count
) -> None:
    jobs = []
    for name, template in {**{name: ENDLESS[name] for name in ("power", "long text")}, **FORBIDDEN}.items():
        if name in ("power", "long text", "class", "exception", "syntax", "recursion", "deep brackets"):
            copy = _give(Path(shutil.copytree(model, tmp_path / name)), template)
            arguments = ["--model", str(copy), "--prompt", PROMPT, "--chat", "--device", "cpu", "--quiet"]
            jobs.append(Job(arguments, folder()))
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [2], "chat template failed")

"""Conversations: `LLM.chat`, and `offload-rt chat` by lines and in a terminal."""

import io
import json
import os
import pty
import re
import select
import sys
import termios
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.checkpoints import speaking_checkpoint
from support.command_line import Line
from support.programs import started, wait_until
from transformers import AutoTokenizer
from write_vision import write_vision

from offload_rt import LLM, SamplingParams
from offload_rt.cli import chat, run
from offload_rt.cli.chat import PlainView, read_messages
from offload_rt.executor.runner import Runner
from offload_rt.kv.cache import n_shared

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{{ mood }}{% if enable_thinking is false %}-{% endif %}{% endif %}"
)
PROMPT = ">"
SHORT = ["--device", "cpu", "--max-model-len", "200", "--drafter", "none"]
# rich erases the last line when it shows more of an answer.
ANSWERING = "\x1b[2K"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, which never ends an answer."""
    path = speaking_checkpoint(tmp_path_factory.mktemp("chatting"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(str(model), device="cpu", max_model_len=200, drafter="none") as llm:
        yield llm


def conversation(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def test_chat_prompt_equals_transformers_template(llm, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = partial(tokenizer.apply_chat_template, return_dict=False)
    several = [conversation("the fox"), conversation("the", " dog", "over", system="lazy")]
    params = [SamplingParams(max_new_tokens=n) for n in (6, 9)]
    outputs = llm.chat(several, params, chat_template_kwargs={"mood": "!"})
    for turns, output, n in zip(several, outputs, (6, 9), strict=True):
        assert output.prompt_token_ids == rendered(turns, add_generation_prompt=True, mood="!")
        assert len(output.token_ids) == n
    plain = llm.chat(several[1], params[0], add_generation_prompt=False)[0]
    assert plain.prompt_token_ids == rendered(several[1])
    other = llm.chat(several[0], params[0], chat_template="{{ messages[0].content }}")[0]
    assert other.prompt_token_ids == tokenizer.encode("the fox")
    assert llm.chat([]) == []


def test_chat_template_is_read_from_a_file(model, line, tmp_path):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = [str(model), "the fox", *SHORT, "--quiet", "--max-tokens", "4"]
    answer = line(*flags)
    assert answer[0] == 0 and line(*flags, "--chat", "--chat-template", str(path)) == answer
    assert line(*flags, "--chat")[1] != answer[1]


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, line: Line) -> Any:
    """Exit code, stdout and stderr of a conversation of these lines."""

    def call(lines: list[str], *flags: str) -> tuple[int, str, str]:
        text = "".join(line + "\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return line("--model", str(model), *SHORT, *flags, main=chat.main)

    return call


def test_chat_turns_reuse_the_prefix_cache(talk, llm, monkeypatch):
    n_rows = []
    forward = Runner.forward

    def counted(runner: Runner, steps: Any) -> Any:
        n_rows.append(sum(step.n_rows for step in steps))
        return forward(runner, steps)

    def answered(*contents: str) -> Any:
        return llm.chat(conversation(*contents, system="lazy"), SamplingParams(max_new_tokens=7))[0]

    first = answered("the fox")
    outputs = [first, answered("the fox", first.text, "jumps"), answered("dog")]
    monkeypatch.setattr(Runner, "forward", counted)
    lines = ["the fox", "", "jumps", "/help", "/what", "/reset", "dog", "/exit", "never"]
    code, out, err = talk(lines, "--system", "lazy", "--max-new-tokens", "7")
    assert (code, out) == (0, "".join(answer.text + "\n" for answer in outputs))
    assert "Ctrl-C" in err and "/what is not a command" in err
    # An answer's text may have other tokens than those that were produced: it is kept as far as
    # they are the same.
    had = [[], *(answer.prompt_token_ids + answer.token_ids[:-1] for answer in outputs[:2])]
    new = [answer.prompt_token_ids for answer in outputs]
    expected = [len(ids) - n_shared(old, ids) for old, ids in zip(had, new, strict=True)]
    assert [n for n in n_rows if n > 1] == expected


def test_chat_flags_reach_the_template(talk, llm, model, line):
    options = {"enable_thinking": False, "mood": "?"}
    params = SamplingParams(max_new_tokens=5)
    (expected,) = llm.chat(conversation("fox"), params, chat_template_kwargs=options)
    flags = ["--no-enable-thinking", '--chat-template-kwargs={"mood": "?"}', "--max-new-tokens=5"]
    flags.append("--quiet")
    assert talk(["fox"], *flags) == (0, expected.text + "\n", "")
    given = ["--model", str(model), *SHORT, "--prompt", "fox", *flags]
    assert line(*given, "--chat")[:2] == (0, expected.text + "\n")
    assert line(*given)[0] == 2
    for wrong in ("{", "[1]"):
        assert talk(["fox"], "--chat-template-kwargs", wrong)[0] == 2


def test_hidden_reasoning_and_lines_with_a_slash(talk):
    """The template opens the reasoning, which never ends. A path is a message."""
    flags = ["--quiet", "--max-tokens", "5", "--chat-template-kwargs", '{"mood": "<think>"}']
    code, out, err = talk(["/usr/bin", "/regen now"], *flags)
    assert code == 0 and out.strip() and err.startswith("error: /regen has no argument")
    assert talk(["/usr/bin"], *flags, "--hide-thinking") == (0, "\n", "")


def test_chat_reports_a_full_context_and_continues(talk):
    lines = ["the " * 300, "fox", "/stats", "fox", "/reset", "fox"]
    code, out, err = talk(lines, "--quiet")
    assert code == 0 and len(out.splitlines()) >= 2
    first, cut, stats, second, reset, again = err.splitlines()
    assert re.search(r"the conversation has 2\d\d of 200 tokens", stats)
    full = "error: the conversation no longer fits the context: needs at most 199 tokens"
    assert first.startswith(full) and second.startswith(full) and cut == again
    assert "the answer is cut off: the context is full" in cut and "/reset" in cut
    assert reset == "new conversation"


def test_chat_and_run_read_the_same_image(tmp_path, monkeypatch, capfd):
    model, path = tmp_path / "model", tmp_path / "a.png"
    write_vision(model)
    Image.linear_gradient("L").save(path)
    flags = ["--device", "cpu", "--max-model-len", "128", "--max-tokens", "6", "--quiet"]
    lines = f"/image {path}\nWhat?\n/stats\n/reset\nWhat?\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    assert chat.main([str(model), *flags]) == 0
    out, err = capfd.readouterr()
    with_image, without = out.splitlines()
    assert with_image != without
    n_tokens = re.search(r"the conversation has (\d+) of 128 tokens", err)
    assert n_tokens is not None and int(n_tokens[1]) > 16 + 6, "an image has 16 tokens"
    assert run.main([str(model), "What?", "--chat", "--image", str(path), *flags]) == 0
    assert capfd.readouterr().out.splitlines() == [with_image]
    assert run.main([str(model), "x", "--chat", "--image", "/nowhere.png", *flags]) == 2
    assert "/nowhere.png cannot be read" in capfd.readouterr().err


def test_dumb_terminal_shows_plain_lines(monkeypatch, capsys):
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("offload_rt.cli.chat._session", None)
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    os.write(ours, b"the fox\n\x04")
    assert list(read_messages()) == ["the fox"]
    assert "\x1b" not in capsys.readouterr().out + os.read(ours, 1000).decode()
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(theirs), "w"))
    assert isinstance(chat._Chat(None, None, chat.ChatSettings(), None, None)._view(), PlainView)


def test_terminal_edits_messages_and_stops_answers(model, tmp_path):
    """Ctrl-C stops an answer or clears the line; Ctrl-D ends the program."""
    line = [str(model), "--device=cpu", "--max-model-len=8192", "--drafter=none"]
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(ours)
    seen = ""

    def read() -> None:
        nonlocal seen
        with suppress(OSError):  # the program has ended
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 1 << 16).decode(errors="replace")

    def until(wanted: str) -> str:
        nonlocal seen
        wait_until(lambda: read() or wanted in seen)
        shown, _, seen = seen.partition(wanted)
        return shown

    environment = {"terminal": os.ttyname(theirs), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    with started("offload_rt.chat", line, tmp_path, **environment) as (program,):
        for typed, *awaited in (
            ("", "Ctrl-D ends", PROMPT),
            ("the fix\x7f\x7fox\x1b\rover\r", "over", ANSWERING),  # a correction, a second line
            ("\x03", "tokens per pass", PROMPT),
            ("/sta\t", "ts"),  # rendered with or without the typed part
            ("\n", "the conversation has", PROMPT),  # as Enter that is pressed during an answer
            ("lost\x03", "Ctrl-D ends", PROMPT),
            ("/stats\n", "the conversation has", PROMPT),
        ):
            os.write(ours, typed.encode())
            shown = until(awaited[0])
            if typed == "\x03":
                assert "tokens/s, 1.00" in shown and "Traceback" not in shown
            for text in awaited[1:]:
                until(text)
        os.write(ours, b"\x04")
        wait_until(lambda: read() or not program.process.is_alive())
        assert program.code() == 0
    assert termios.tcgetattr(ours) == before
    for end in (ours, theirs):
        os.close(end)

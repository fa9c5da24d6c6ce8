"""Conversations: `LLM.chat`, and `offload-rt chat` by lines and in a terminal."""

import io
import json
import os
import pty
import re
import select
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import speaking_checkpoint
from support.programs import started, wait_until
from transformers import AutoTokenizer

from offload_rt import LLM, SamplingParams
from offload_rt.cli import chat, run
from offload_rt.cli.terminal import PlainView, read_messages
from offload_rt.errors import PromptError
from offload_rt.executor.runner import Runner
from offload_rt.kv.cache import n_shared

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{{ mood }}{% if enable_thinking is false %}-{% endif %}{% endif %}"
)
PATIENCE_S = 60.0
PROMPT = ">"
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
    """Alternate turns of user and model."""
    turns = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def test_chat_prompt_equals_transformers_template(llm, model):
    """With and without template settings."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    params = SamplingParams(max_new_tokens=6)
    several = [conversation("the fox"), conversation("the", " dog", "over", system="lazy")]
    outputs = llm.chat(
        several, [params, SamplingParams(max_new_tokens=9)], chat_template_kwargs={"mood": "!"}
    )
    for turns, output, n in zip(several, outputs, (6, 9), strict=True):
        rendered = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, mood="!", return_dict=False
        )
        assert (output.prompt_token_ids, len(output.token_ids)) == (rendered, n)
    plain = llm.chat(several[1], params, add_generation_prompt=False)[0]
    assert plain.prompt_token_ids == tokenizer.apply_chat_template(several[1], return_dict=False)
    other = llm.chat(several[0], params, chat_template="{{ messages[0].content }}")[0]
    assert other.prompt_token_ids == tokenizer.encode("the fox")
    assert llm.chat([]) == []


def test_chat_without_template_is_one_sentence(tmp_path, capfd):
    path = str(speaking_checkpoint(tmp_path))
    with (
        LLM(path, device="cpu", max_model_len=64) as llm,
        pytest.raises(PromptError, match="no chat template"),
    ):
        llm.chat(conversation("hello"))
    assert chat.main(["--model", path, "--device", "cpu", "--max-model-len", "64"]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.count("\n") == 1 and "no chat template" in err


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Exit code, stdout and stderr of a conversation of these lines."""

    def call(lines: list[str], *flags: str) -> tuple[int, str, str]:
        text = "".join(line + "\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        capfd.readouterr()
        given = [
            *f"--model {model} --device cpu --max-model-len 200 --drafter none".split(),
            *flags,
        ]
        return chat.main(given), *capfd.readouterr()

    return call


def test_chat_turns_reuse_the_prefix_cache(talk, llm, monkeypatch):
    n_rows = []
    forward = Runner.forward

    def counted(runner: Runner, steps: Any) -> Any:
        n_rows.append(sum(step.n_rows for step in steps))
        return forward(runner, steps)

    params = SamplingParams(max_new_tokens=7)
    first = llm.chat(conversation("the fox", system="lazy"), params)[0]
    second = llm.chat(conversation("the fox", first.text, "jumps", system="lazy"), params)[0]
    again = llm.chat(conversation("dog", system="lazy"), params)[0]
    monkeypatch.setattr(Runner, "forward", counted)
    lines = ["the fox", "", "jumps", "/help", "/what", "/reset", "dog", "/exit", "never"]
    code, out, err = talk(lines, "--system", "lazy", "--max-new-tokens", "7")
    assert (code, out) == (0, "".join(answer.text + "\n" for answer in (first, second, again)))
    assert "Ctrl-C" in err and "/what is not a command" in err
    # An answer's text may have other tokens than those that were produced: it is kept as far as
    # they are the same.
    computed = first.prompt_token_ids, second.prompt_token_ids, again.prompt_token_ids
    had = (
        [],
        first.prompt_token_ids + first.token_ids[:-1],
        second.prompt_token_ids + second.token_ids[:-1],
    )
    assert [n for n in n_rows if n > 1] == [
        len(new) - n_shared(old, new) for old, new in zip(had, computed, strict=True)
    ]


def test_chat_template_is_read_from_a_file(tmp_path, capfd):
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    given = ["--model", str(speaking_checkpoint(tmp_path / "model")), "--device", "cpu", "--quiet"]
    given += ["--max-model-len", "64", "--max-tokens", "4", "--prompt", "the fox"]
    assert run.main([*given, "--chat", "--chat-template", str(path)]) == 0
    with_template = capfd.readouterr().out
    assert run.main(given) == 0
    assert capfd.readouterr().out == with_template
    assert run.main([*given, "--chat", "--chat-template", str(tmp_path / "none")]) == 2
    assert "--chat-template" in capfd.readouterr().err


def test_chat_flags_reach_the_template(talk, llm, model, capfd):
    options = {"enable_thinking": False, "mood": "?"}
    expected = llm.chat(
        conversation("fox"), SamplingParams(max_new_tokens=5), chat_template_kwargs=options
    )[0].text
    flags = [
        "--no-enable-thinking", "--chat-template-kwargs", '{"mood": "?"}', "--max-new-tokens", "5",
    ]  # fmt: skip
    assert talk(["fox"], *flags, "--quiet") == (0, expected + "\n", "")
    given = [
        *f"--model {model} --device cpu --max-model-len 200 --drafter none --quiet".split(),
    ]
    assert run.main([*given, "--chat", "--prompt", "fox", *flags]) == 0
    assert capfd.readouterr().out == expected + "\n"
    assert run.main([*given, "--prompt", "fox", *flags]) == 2
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
    assert first.startswith(
        "error: the conversation no longer fits the context: needs at most 199 tokens"
    )
    assert "the answer is cut off: the context is full" in cut and "/reset" in cut
    assert second.startswith("error: the conversation no longer fits") and cut == again
    assert reset == "new conversation"


class Terminal:
    """A program at the other end of a pseudo-terminal."""

    def __init__(self, ours: int) -> None:
        self.seen = ""
        self.ours = ours
        self.before = termios.tcgetattr(ours)

    def until(self, wanted: str) -> str:
        """Return the output up to these characters."""
        limit = time.monotonic() + PATIENCE_S
        while wanted not in self.seen:
            assert time.monotonic() < limit, self.seen
            self.read()
        shown, _, self.seen = self.seen.partition(wanted)
        return shown

    def read(self) -> None:
        with suppress(OSError):  # the program has ended
            if select.select([self.ours], [], [], 0.2)[0]:
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())


def test_dumb_terminal_shows_plain_lines(monkeypatch, capsys):
    """Ctrl-D ends the input."""
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("offload_rt.cli.terminal._session", None)
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    os.write(ours, b"the fox\n\x04")
    assert list(read_messages()) == ["the fox"]
    assert "\x1b" not in capsys.readouterr().out + os.read(ours, 1000).decode()
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(theirs), "w"))
    view = chat._Chat(None, None, chat.ChatSettings(), None, None)._view()
    assert isinstance(view, PlainView)


def test_terminal_edits_messages_and_stops_answers(model, tmp_path):
    """Ctrl-C stops an answer or clears the line; Ctrl-D ends the program."""
    flags = ["--device", "cpu", "--max-model-len", "8192", "--drafter", "none"]
    ours, theirs = pty.openpty()
    terminal = Terminal(ours)
    environment = {"terminal": os.ttyname(theirs), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    line = ["--model", str(model), *flags]
    with started("offload_rt.chat", line, tmp_path, **environment) as (program,):
        terminal.until("Ctrl-D ends")
        terminal.until(PROMPT)
        terminal.type("the fix\x7f\x7fox\x1b\rover\r")  # two characters deleted, a second line
        terminal.until("over")
        terminal.until(ANSWERING)
        terminal.type("\x03")
        shown = terminal.until("tokens per pass")
        assert "tokens/s, 1.00" in shown and "Traceback" not in shown
        terminal.until(PROMPT)
        terminal.type("/sta\t")
        terminal.until("ts")  # rendered with or without the typed part
        terminal.type("\n")  # as Enter arrives that is pressed during an answer
        terminal.until("the conversation has")
        terminal.until(PROMPT)
        terminal.type("lost\x03")
        terminal.until("Ctrl-D ends")
        terminal.until(PROMPT)
        terminal.type("/stats\n")
        terminal.until("the conversation has")
        terminal.until(PROMPT)
        terminal.type("\x04")
        wait_until(lambda: terminal.read() or not program.process.is_alive())
        assert program.code() == 0
    assert termios.tcgetattr(ours) == terminal.before
    for end in (ours, theirs):
        os.close(end)

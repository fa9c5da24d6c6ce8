"""Conversations: `LLM.chat`, and `offload-rt chat`: commands, lines, and a terminal."""

import base64
import io
import os
import pty
import re
import select
import sys
import termios
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from support.checkpoints import speaking_checkpoint
from support.command_line import Line
from support.heads import edit_config
from support.programs import started, wait_until
from transformers import AutoTokenizer
from write_vision import write_vision

from offload_rt import LLM, SamplingParams
from offload_rt.cli import chat, run
from offload_rt.cli.chat import MarkdownView, PlainView, read_messages, split_blocks
from offload_rt.cli.conversation import Conversation
from offload_rt.errors import OffloadError
from offload_rt.text.reasoning import TextPart

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
    edit_config(path, "tokenizer_config.json", chat_template=TEMPLATE)
    return path


@pytest.fixture(scope="module")
def llm(model: Path) -> Any:
    with LLM(str(model), device="cpu", max_model_len=200, drafter="none") as llm:
        yield llm


def turns_of(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    return turns if system is None else [{"role": "system", "content": system}, *turns]


def test_chat_prompt_equals_transformers_template(llm, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    rendered = partial(tokenizer.apply_chat_template, return_dict=False)
    several = [turns_of("the fox"), turns_of("the", " dog", "over", system="lazy")]
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


@pytest.fixture
def talk(model: Path, monkeypatch: pytest.MonkeyPatch, line: Line) -> Any:
    """Exit code, stdout and stderr of a conversation of these lines."""

    def call(lines: list[str], *flags: str) -> tuple[int, str, str]:
        text = "".join(line + "\n" for line in lines).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        return line("--model", str(model), *SHORT, *flags, main=chat.main)

    return call


def test_chat_answers_equal_those_of_python(talk, llm):
    def answered(*contents: str) -> Any:
        return llm.chat(turns_of(*contents, system="lazy"), SamplingParams(max_new_tokens=7))[0]

    first = answered("the fox")
    outputs = [first, answered("the fox", first.text, "jumps"), answered("dog")]
    lines = ["the fox", "", "jumps", "/help", "/what", "/reset", "dog", "/exit", "never"]
    code, out, err = talk(lines, "--system", "lazy", "--max-new-tokens", "7")
    assert (code, out) == (0, "".join(answer.text + "\n" for answer in outputs))
    assert "Ctrl-C" in err and "/what is not a command" in err


def test_chat_flags_reach_the_template(talk, llm, model, line, tmp_path):
    options = {"enable_thinking": False, "mood": "?"}
    params = SamplingParams(max_new_tokens=5)
    (expected,) = llm.chat(turns_of("fox"), params, chat_template_kwargs=options)
    flags = ["--no-enable-thinking", '--chat-template-kwargs={"mood": "?"}', "--max-new-tokens=5"]
    flags.append("--quiet")
    assert talk(["fox"], *flags) == (0, expected.text + "\n", "")
    given = [str(model), "fox", *SHORT]
    assert line(*given, *flags, "--chat")[:2] == (0, expected.text + "\n")
    assert line(*given, *flags)[0] == 2
    path = tmp_path / "chat.jinja"
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ["--quiet", "--max-tokens", "5"]
    plain = line(*given, *flags)
    assert plain[0] == 0 and line(*given, *flags, "--chat", "--chat-template", str(path)) == plain
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


@pytest.fixture
def conversation() -> Conversation:
    started = Conversation(SamplingParams(), "Be brief.")
    for question, answer in (("a", "1"), ("b", "2")):
        started.add_answer(started.ask(question), answer)
    return started


def test_undo_and_regenerate_remove_the_last_turn(conversation):
    assert [turn["content"] for turn in conversation.regenerate()] == ["a", "1", "b"]
    assert conversation.run("/undo") == "messages left: 1"
    assert [turn["content"] for turn in conversation.messages] == ["a", "1"]
    conversation.run("/undo")
    assert conversation.run("/undo") == "the conversation is empty"
    with pytest.raises(OffloadError, match="no answer"):
        conversation.regenerate()


def test_wrong_file_leaves_the_conversation_unchanged(conversation, tmp_path):
    before = list(conversation.messages)
    part = '{"role": "user", "content": [{"image_url": {"url": "http:"}}, {"text": "a"}]}'
    for content in (
        "[]", "{", '{"version": 1}', '{"version": 3, "messages": [], "system": null}',
        '{"version": 1, "messages": [], "system": 5}', "[" * 100_000,
        '{"version": 1, "messages": [{"role": "user", "content": "a"}], "system": null}',
        f'{{"version": 2, "messages": [{part}, {{"role": "assistant", "content": "b"}}],'
        ' "system": null}',
    ):  # fmt: skip
        (tmp_path / "x").write_text(content)
        with pytest.raises(OffloadError, match="not a saved conversation"):
            conversation.run(f"/load {tmp_path / 'x'}")
        assert conversation.messages == before


def test_files_and_images_join_the_next_message_only(conversation, tmp_path, monkeypatch):
    """Saved and loaded conversations keep both."""
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), "teal").save(buffer, "WEBP")
    (tmp_path / "a.webp").write_bytes(buffer.getvalue())
    (tmp_path / "bad.png").write_bytes(buffer.getvalue()[:-9])
    (tmp_path / "code.md").write_text("```\nx\n```")
    with pytest.raises(OffloadError, match="needs a model with a vision tower"):
        conversation.run(f"/image {tmp_path / 'a.webp'}")
    conversation.has_vision = True
    with pytest.raises(OffloadError, match=r"bad.png: no readable image"):
        conversation.run(f"/image {tmp_path / 'bad.png'}")
    url = f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    for command, name, content in (
        ("/file", "code.md", "code.md:\n````\n```\nx\n```\n````\n\nExplain"),
        ("/image", "a.webp", [image, {"type": "text", "text": "Explain"}]),
    ):
        attach = f"{command} {tmp_path / name}"
        assert f"{name} is part of the next message" in conversation.run(attach)
        assert conversation.run("/undo") == "removed the attached files"
        assert conversation.ask("Explain")[-1]["content"] == "Explain"
        conversation.run(attach)
        asked = conversation.ask("Explain")
        assert asked[-1]["content"] == content
        conversation.add_answer(asked, "3")
        assert conversation.ask("And?")[-1]["content"] == "And?"
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "my chat.json"
    assert conversation.run("/save ~/my chat.json") == f"saved 8 messages to {path}"
    other = Conversation(SamplingParams())
    assert other.run(f"/load {path}") == "loaded 8 messages"
    assert (other.messages, other.system) == (conversation.messages, "Be brief.")
    other.run("/system")
    assert other.system is None


def test_wrong_command_is_reported_in_one_sentence(conversation):
    for line, message in (
        ("/image", "needs a path"), ("/file", "needs a path"), ("/file /nowhere", "cannot be read"),
        ("/file .", "cannot be read"), ("/save /nowhere/x", "cannot be written"),
        ("/reset now", "/reset has no argument"), ("/undo 2", "/undo has no argument"),
        ("/set colour 1", "not a parameter of a conversation: needs one of max_tokens, temp"),
        ("/set n 2", "not a parameter"), ("/set temperature warm", "needs a number"),
        ("/set top_p 2", "above 0 and at most 1"), ("/nothing", "not a command"),
    ):  # fmt: skip
        with pytest.raises(OffloadError, match=message) as raised:
            conversation.run(line)
        assert "\n" not in str(raised.value)


def test_parameters_are_set_and_shown(conversation):
    assert conversation.run("/set") == "defaults"
    for line in ("temperature 0.7", "--top-k 5", "stop END", "ignore_eos true"):
        conversation.run(f"/set {line}")
    expected = SamplingParams(temperature=0.7, top_k=5, stop=("END",), ignore_eos=True)
    assert conversation.params == expected
    assert "temperature 0.7" in conversation.run("/set")
    assert conversation.run("/set temperature") == "temperature 0.7"
    for line in ("max_new_tokens 7", "max-tokens 8", "max_new_tokens 9", "temperature none"):
        conversation.run(f"/set {line}")
    assert conversation.params == replace(expected, max_tokens=9, temperature=None)


def screen(output: str) -> list[str]:
    """Lines of a terminal behind this output, which erases from the last line upwards."""
    lines = [""]
    for code, text in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|([\r\n]|[^\r\n\x1b]+)", output):
        if code == "1A":
            lines.pop()
        elif code == "2K":
            lines[-1] = ""
        elif text == "\n":
            lines.append("")
        elif text != "\r":
            lines[-1] += text
    return [line.strip() for line in lines if line.strip()]


def test_reasoning_and_answer_stay_on_a_narrow_screen(capsys):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, height=20)
    for view in (MarkdownView(console), PlainView()):
        for text, is_reasoning in (("I", True), (" think\nhard", True), ("The **answer**", False)):
            view.add(TextPart(text, is_reasoning))
        view.close()
    assert capsys.readouterr().out == "I think\nhard\n\nThe **answer**\n"
    assert screen(output.getvalue()) == ["I think", "hard", "The answer"]


def test_blocks_end_at_blank_lines_and_fences():
    for text, done in (
        ("one\ntwo\n", ""), ("one\n\ntwo\n", "one\n\n"), ("```py\na\n\nb\n", ""),
        ("```py\na\n\nb\n```\nrest", "```py\na\n\nb\n```\n"),
        ("````\n```\n\n````\n", "````\n```\n\n````\n"), ("one\n\n```\nx\n\n", "one\n\n"),
    ):  # fmt: skip
        assert split_blocks(text) == (done, text[len(done) :])

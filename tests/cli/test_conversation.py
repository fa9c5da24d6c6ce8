"""Commands of a conversation and the Markdown blocks of its answers."""

import base64
import io
import re
from dataclasses import replace

import pytest
from PIL import Image
from rich.console import Console

from offload_rt.cli.chat import MarkdownView, PlainView, split_blocks
from offload_rt.cli.conversation import Conversation
from offload_rt.errors import OffloadError
from offload_rt.sampling_params import SamplingParams
from offload_rt.text.reasoning import TextPart


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


def test_files_and_images_precede_the_next_message_only_and_are_saved(
    conversation, tmp_path, monkeypatch
):
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
    """Lines of a terminal behind this output."""
    lines = [""]
    row, column = 0, 0
    for code, text in re.findall(r"\x1b\[([?\d;]*[A-Za-z])|([\r\n]|[^\r\n\x1b]+)", output):
        if code == "2K":
            lines[row] = ""
        elif code == "1A":
            row -= 1
        elif text == "\r":
            column = 0
        elif text == "\n":
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text
            column += len(text)
    return [line.strip() for line in lines]


PARTS = [TextPart("I", True), TextPart(" think\nhard", True), TextPart("The **answer**", False)]


def test_reasoning_and_answer_stay_on_a_narrow_screen(capsys):
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40, height=20)
    for view in (MarkdownView(console), PlainView()):
        for part in PARTS:
            view.add(part)
        view.close()
    assert capsys.readouterr().out == "I think\nhard\n\nThe **answer**\n"
    assert [line for line in screen(output.getvalue()) if line] == ["I think", "hard", "The answer"]


def test_blocks_end_at_blank_lines_and_fences():
    for text, done in (
        ("one\ntwo\n", ""), ("one\n\ntwo\n", "one\n\n"), ("```py\na\n\nb\n", ""),
        ("```py\na\n\nb\n```\nrest", "```py\na\n\nb\n```\n"),
        ("````\n```\n\n````\n", "````\n```\n\n````\n"), ("one\n\n```\nx\n\n", "one\n\n"),
    ):  # fmt: skip
        assert split_blocks(text) == (done, text[len(done) :])

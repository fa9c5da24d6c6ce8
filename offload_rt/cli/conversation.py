"""A conversation in the terminal and its commands, independent of input and output."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from offload_rt.config import parser_of
from offload_rt.errors import PromptError, SettingsError
from offload_rt.sampling_params import SamplingParams
from offload_rt.system.files import write_atomically
from offload_rt.text import images as image_files

COMMANDS = {
    "/reset": "start a new conversation",
    "/undo": "remove attached files, else the last message and its answer",
    "/regen": "replace the last answer",
    "/system": "TEXT: set the system message; without TEXT: remove it",
    "/set": "NAME VALUE: change a sampling parameter; without VALUE or NAME: show values",
    "/file": "PATH: add a text file to the next message",
    "/image": "PATH: add an image to the next message: PNG, JPEG, WebP or GIF",
    "/save": "PATH: write the conversation to a JSON file",
    "/load": "PATH: replace the conversation by that of a file",
    "/stats": "show figures of the last answer and the length of the conversation",
    "/help": "show the commands; Ctrl-C stops an answer and keeps its text",
    "/exit": "end, like Ctrl-D",
}
_WITH_PATH = ("/file", "/image", "/save", "/load")
# Values of settings by type.
_NEEDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false"}
# Sampling parameters of /set.
PARAMETERS = [
    item.name
    for item in fields(SamplingParams)
    if item.metadata and item.name not in ("n", "logprobs", "prompt_logprobs", "max_new_tokens")
]
# Version 2 may contain images.
_VERSIONS = (1, 2)
# Most bytes of an attached text, and of a saved conversation.
_MOST_TEXT = 1 << 20
_MOST_RECORD = 1 << 28

# The content is a text, or a list of OpenAI's parts "image_url" and "text".
Message = dict[str, Any]


@dataclass
class Conversation:
    """Messages so far, and texts, data URLs of images and settings for the next message."""

    params: SamplingParams
    system: str | None = None
    messages: list[Message] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    has_vision: bool = False

    def ask(self, text: str) -> list[Message]:
        """Return the messages with a new one of the user. `add_answer` makes it permanent."""
        return [*self.messages, user_turn("\n\n".join([*self.attached, text]), self.images)]

    def add_answer(self, asked: list[Message], answer: str) -> None:
        """Append the user's message and the answer."""
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        self._drop_attached()

    def regenerate(self) -> list[Message]:
        """Return the messages without the last answer. Raises PromptError without an answer."""
        if not self.messages:
            raise PromptError("there is no answer to replace", change="write a message first")
        return self.messages[:-1]

    def run(self, line: str) -> str:
        """Execute a command by its method; returns the text to show.

        Raises SettingsError or PromptError for an unknown command or wrong arguments.
        """
        command, rest = split_command(line)
        handle = getattr(self, f"_{command[1:]}", None) if command in COMMANDS else None
        if handle is None:
            raise SettingsError(f"{command} is not a command", change="/help lists the commands")
        if command not in _WITH_PATH:
            return str(handle(rest))
        if not rest:
            raise SettingsError(command, need="a path", change=f"write {command} PATH")
        return str(handle(Path(rest).expanduser()))

    def _help(self, _: str) -> str:
        width = max(map(len, COMMANDS))
        return "\n".join(f"{name:{width}}  {text}" for name, text in COMMANDS.items())

    def _reset(self, _: str) -> str:
        self.messages = []
        self._drop_attached()
        return "new conversation"

    def _system(self, text: str) -> str:
        self.system = text or None
        return f"system message: {text}" if text else "no system message"

    def _drop_attached(self) -> None:
        self.attached = []
        self.images = []

    def _undo(self, _: str) -> str:
        if self.attached or self.images:
            self._drop_attached()
            return "removed the attached files"
        if not self.messages:
            return "the conversation is empty"
        del self.messages[-2:]
        return f"messages left: {len(self.messages) // 2}"

    def _set(self, text: str) -> str:
        items = {item.name: item for item in fields(SamplingParams)}
        values = {name: getattr(self.params, name) for name in items}
        if not text:
            changed = (name for name, item in items.items() if values[name] != item.default)
            return "\n".join(f"{name} {values[name]}" for name in changed) or "defaults"
        name, _, value = text.partition(" ")
        name = name.lstrip("-").replace("-", "_").replace("max_new_tokens", "max_tokens")
        if name not in PARAMETERS:
            need = "one of " + ", ".join(PARAMETERS)
            raise SettingsError(f"{name} is not a parameter of a conversation", need=need)
        if not value:
            return f"{name} {values[name]}"
        item = items[name]
        value = value.strip()
        try:
            parsed: Any = None
            if isinstance(item.default, bool) and value.lower() != "none":
                parsed = {"true": True, "false": False}[value.lower()]
            elif value.lower() != "none":
                parsed = parser_of(item)(value)
        except (ValueError, KeyError) as error:
            kinds = get_args(item.type) or (item.type,)
            need = next((_NEEDS[kind] for kind in kinds if kind in _NEEDS), "another value")
            raise SettingsError(f"/set {text}", need=need) from error
        if isinstance(item.default, tuple):
            parsed = (parsed,)
        self.params = replace(self.params, **{name: parsed})
        return f"{name} {parsed}"

    def _file(self, path: Path) -> str:
        text = _read(path, _MOST_TEXT)
        fence = "```"
        while fence in text:
            fence += "`"
        self.attached.append(f"{path.name}:\n{fence}\n{text}\n{fence}")
        return f"{path.name} is part of the next message ({len(text)} characters)"

    def _image(self, path: Path) -> str:
        if not self.has_vision:
            raise PromptError("/image", need="a model with a vision tower", have="a model of text")
        self.images.append(image_url(path))
        return f"{path.name} is part of the next message"

    def _save(self, path: Path) -> str:
        version = _VERSIONS[image_files.has_images(self.messages)]
        record = {"version": version, "system": self.system, "messages": self.messages}
        try:
            write_atomically(path, json.dumps(record, ensure_ascii=False, indent=1).encode())
        except OSError as error:
            raise SettingsError(f"{path} cannot be written: {error.strerror}") from error
        return f"saved {len(self.messages)} messages to {path}"

    def _load(self, path: Path) -> str:
        problem = f"{path} is not a saved conversation"
        try:
            record = json.loads(_read(path, _MOST_RECORD))
            messages = [
                {"role": str(turn["role"]), "content": _loaded(turn["content"])}
                for turn in record["messages"]
            ]
            version, system = record["version"], record["system"]
            roles = ["user", "assistant"] * (len(messages) // 2)
            if [turn["role"] for turn in messages] != roles or not isinstance(system, str | None):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise PromptError(problem, change="choose a file of /save") from error
        if version not in _VERSIONS:
            raise PromptError(problem, need=f"version {_VERSIONS[-1]}", have=str(version))
        self.messages = messages
        self.system = system
        self._drop_attached()
        return f"loaded {len(messages)} messages"


def user_turn(text: str, urls: Sequence[str]) -> Message:
    """Return a message of the user: images, followed by a text."""
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*images, {"type": "text", "text": text}] if images else text
    return {"role": "user", "content": content}


def image_url(path: Path) -> str:
    """Return the data URL of an image file. Raises PromptError for an unusable image."""
    content = image_files.read_image(path, image_files.DEFAULT_LIMITS.nbytes)
    try:
        image_files.decode_image(content)
    except PromptError as error:
        raise error.prefixed(str(path)) from error
    return image_files.encode_data_url(content)


def _loaded(content: Any) -> Any:
    if isinstance(content, str):
        return content
    *images, text = content
    urls = [str(part["image_url"]["url"]) for part in images]
    if not all(url.startswith("data:image/") for url in urls):
        raise ValueError
    return user_turn(str(text["text"]), urls)["content"]


def split_command(line: str) -> tuple[str, str]:
    """Split a line into command and argument. Raises SettingsError for a surplus argument."""
    command, *rest = line.split(maxsplit=1)
    if rest and command in COMMANDS and command not in ("/system", "/set", *_WITH_PATH):
        raise SettingsError(f"{command} has no argument", change=f"write {command} alone")
    return command, "".join(rest)


def _read(path: Path, max_nbytes: int) -> str:
    try:
        content = path.read_bytes()
        if len(content) > max_nbytes:
            need = f"at most {max_nbytes} bytes"
            raise PromptError(f"{path} is too large", need=need, have=str(len(content)))
        return content.decode()
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is no text in UTF-8", change="choose a text file") from error

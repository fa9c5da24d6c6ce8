"""Encode prompts and conversations; decode answers token by token."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.errors import CapacityError, CheckpointError, PromptError, SettingsError
from offload_rt.text.gguf_tokenizer import load_gguf_tokenizer

if TYPE_CHECKING:  # The import takes 0.3 s; `offload-rt plan` needs no tokenizer.
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# One turn of a conversation: "role", "content", and further keys of the chat template.
Message = Mapping[str, Any]

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# Statements of chat templates that change a list of a namespace.
_APPEND = re.compile(r"\{%(-?)\s*set\s+\w+\s*=\s*(\w+\.\w+)\.append\(([^(){}%]+)\)\s*(-?)%\}")
_POP = re.compile(r"\{%(-?)\s*set\s+(\w+)\s*=\s*(\w+\.\w+)\.pop\(0\)\s*(-?)%\}")


class TextStream:
    """Incremental text of an answer, in whole characters, up to a stop string.

    Leading spaces and split characters make a token's text depend on earlier tokens.
    Each step therefore decodes a short window and appends the difference.
    `tokenizers.decoders.DecodeStream` raises on invalid bytes with byte-fallback tokenizers.
    It also delays whole characters before an incomplete character.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        prompt: Sequence[int],
        stop: Sequence[str],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skips_special = skip_special_tokens
        # Prompt tokens at the start of the window preserve the leading space of the answer.
        self._window = list(prompt[-6:])
        self._n_new = 0
        self._n_known = len(self._decode_window().rstrip(_REPLACEMENT))
        self._n_held_back = max((len(text) for text in self._stop), default=1) - 1
        self._n_taken = 0
        self.stop_string: str | None = None  # the stop string that ended the text
        self.text = ""  # ends before the stop string

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Append one token. Returns whether a stop string is complete.

        may_stop  False ignores stop strings, for texts below `min_tokens`
        """
        self._window.append(token)
        self._n_new += 1
        decoded = self._decode_window()
        whole = decoded.rstrip(_REPLACEMENT)  # the last character may be incomplete
        if len(whole) <= self._n_known:
            return False
        n_before = len(self.text)
        self.text += whole[self._n_known :]
        self._n_known = len(whole)
        if whole == decoded:
            del self._window[: -self._n_new]
            self._n_new = 0
            self._n_known = len(self._decode_window())
        if may_stop:
            self._find_stop(n_before)
        return self.stop_string is not None

    def _find_stop(self, n_before: int) -> None:
        """Cut the text at the first stop string that ends behind `n_before` characters."""
        starts = {
            stop: self.text.find(stop, max(n_before - len(stop) + 1, 0)) for stop in self._stop
        }
        matches = [stop for stop in self._stop if starts[stop] >= 0]
        if matches:
            self.stop_string = min(matches, key=starts.__getitem__)
            self.text = self.text[: starts[self.stop_string]]

    def decode(self, token: int) -> str:
        """Decode one token alone."""
        return str(self._tokenizer.decode([token]))

    def take(self, final: bool = False) -> str:
        """Return new text. A possible start of a stop string follows later, or with `final`."""
        n_held_back = 0 if final or self.stop_string is not None else self._n_held_back
        start = self._n_taken
        self._n_taken = max(len(self.text) - n_held_back, start)
        return self.text[start : self._n_taken]

    def _decode_window(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=self._skips_special))


def token_bytes(tokenizer: "PreTrainedTokenizerBase", token: int) -> bytes:
    """Return the bytes of one token, including parts of a UTF-8 character."""
    decoded = str(tokenizer.decode([token]))
    if _REPLACEMENT not in decoded:
        return decoded.encode()
    symbol = str(tokenizer.convert_ids_to_tokens(token))
    if match := _BYTE_TOKEN.fullmatch(symbol):
        return bytes.fromhex(match[1])
    alphabet = _byte_alphabet()
    if alphabet.keys() >= {*symbol}:
        return bytes(map(alphabet.__getitem__, symbol))
    return decoded.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    characters: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]
    return {character: byte for byte, character in characters.items()}


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    """Load the tokenizer of a checkpoint directory or GGUF file, without running its code.

    Returns None if the checkpoint has no tokenizer.
    Raises CheckpointError if the tokenizer is damaged.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if path.is_dir() and not any((path / name).exists() for name in names):
        return None
    tokenizer: PreTrainedTokenizerBase | None
    try:
        if path.is_file():
            tokenizer = load_gguf_tokenizer(path)
        else:
            from transformers import AutoTokenizer  # imports in 0.3 s beside transformers

            options = {"trust_remote_code": False, "local_files_only": True}
            tokenizer = AutoTokenizer.from_pretrained(path, config=_type_of_model(path), **options)
    except Exception as error:  # transformers and tokenizers raise OSError to bare Exception
        problem = f"the tokenizer in {path} cannot be loaded: {_brief(error)}"
        change = "download it again, or use a tokenizer that transformers knows"
        raise CheckpointError(problem, change=change) from error
    if tokenizer is None:
        return None
    if tokenizer.chat_control_tokens is None:
        # Markers such as <think> and <tool_call> stay tokens: clients send them in history.
        tokenizer.chat_control_tokens = ()
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = without_mutation(tokenizer.chat_template)
    return tokenizer


def without_mutation(template: str) -> str:
    """Replace `append` and `pop` of a chat template, which transformers' sandbox refuses.

    The statements assign a new list instead. Templates of Kimi-K2 in GGUF files need this.
    """
    template = _APPEND.sub(r"{%\1 set \2 = \2 + [\3] \4%}", template)
    return _POP.sub(r"{%\1 set \2 = \3[0] %}{%- set \3 = \3[1:] \4%}", template)


def _type_of_model(path: Path) -> "PreTrainedConfig | None":
    """Return a minimal config if tokenizer_config.json names the tokenizer class, else None.

    The complete config imports the model's config class, which is slower than the tokenizer.
    """
    files = path / "tokenizer_config.json", path / "config.json"
    if not all(file.exists() for file in files):
        return None
    about, config = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if not about.get("tokenizer_class"):
        return None
    from transformers import PreTrainedConfig

    minimal = PreTrainedConfig()
    minimal.model_type = config.get("model_type", "")  # type: ignore[misc]  # of this instance
    return minimal


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    text: str,
    max_characters: float = inf,
    add_special_tokens: bool = True,
) -> list[int]:
    """Encode a text.

    Raises PromptError if the tokenizer fails, CapacityError above `max_characters`.
    """
    _check_length(text, max_characters)
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # tokenizers raises bare Exception for gaps in the vocabulary
        problem = f"the model's tokenizer failed: {_brief(error)}"
        raise PromptError(problem, change="use the tokenizer of this model") from error


def set_chat_template(tokenizer: "PreTrainedTokenizerBase | None", path: Path) -> None:
    """Replace the chat template by that of a file.

    Raises SettingsError for an unreadable file, PromptError without a tokenizer.
    """
    if tokenizer is None:
        raise PromptError("--chat-template", need="a tokenizer", have="a checkpoint without one")
    try:
        tokenizer.chat_template = without_mutation(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problem = f"--chat-template={path} cannot be read: {reason}"
        raise SettingsError(problem, change="give a text file with a Jinja template") from error


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase",
    messages: Sequence[Message],
    options: Mapping[str, Any],
    max_characters: float = inf,
) -> list[int]:
    """Encode a conversation with the model's chat template, in the sandbox of transformers.

    Special tokens inside messages are encoded as plain text.
    options  arguments of `apply_chat_template` and template variables
    Raises PromptError for a missing or failing template, CapacityError above `max_characters`.
    """
    change = "set --chat-template to a file, or send the whole text as a prompt"
    if not (tokenizer.chat_template or options.get("chat_template")):
        raise PromptError("the model has no chat template", change=change)
    if isinstance(messages, str) or not all(isinstance(turn, Mapping) for turn in messages):
        need = 'a list of dictionaries with "role" and "content"'
        raise PromptError("the conversation", need=need, have=repr(messages)[:80])
    turns = [dict(message) for message in messages]
    try:
        # Tokenizers take long for endless texts, so check the length of the rendered text first.
        text = str(tokenizer.apply_chat_template(turns, **{**options, "tokenize": False}))
        _check_length(text, max_characters)
        encoding = {"tokenize": True, "return_dict": False, "sanitize_control_tokens": True}
        ids: Any = tokenizer.apply_chat_template(turns, **{**options, **encoding})
    except CapacityError:
        raise
    except Exception as error:  # templates are programs and raise any class
        problem = f"the chat template failed: {_brief(error).rstrip('.')}"
        raise PromptError(problem, change=change) from error
    return list(ids)


def _check_length(text: str, max_characters: float) -> None:
    if len(text) > max_characters:
        need = f"at most {max_characters} characters, the context length times the longest token"
        have = str(len(text))
        raise CapacityError("the prompt is too long", need=need, have=have, change="shorten it")


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

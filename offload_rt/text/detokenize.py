"""Text that comes out token by token: never half a character, never past a stop string."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from offload_rt.errors import CheckpointError, PromptError
from offload_rt.text.chat import render

if TYPE_CHECKING:  # it takes a third of a second to load, and a plan needs none
    from transformers import PreTrainedTokenizerBase


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """The text of ids."""


class TextStream:
    """The text of a growing answer.

    A token's text may depend on the tokens before it (leading spaces, bytes of one character), so each piece is what the
    text of a short window of tokens gains by the new ones.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._decoder, self._stop = decoder, tuple(stop)
        self._ids = list(prompt)
        # The window begins a few tokens back, so that the first new token is not taken for the beginning of a text.
        self._from, self._done = max(len(self._ids) - 6, 0), len(self._ids)
        self._n_known = len(_whole(self._window()))
        self._held = max((len(text) for text in self._stop), default=1) - 1
        self._text = ""
        self._n_taken = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """All text so far, a stop string and what follows it cut off."""
        return self._text

    def add(self, token: int) -> bool:
        """Take one token; returns whether a stop string is complete."""
        self._ids.append(token)
        window = self._window()
        whole = _whole(window)
        if len(whole) <= self._n_known:
            return False
        searched = max(len(self._text) - self._held, 0)
        self._text += whole[self._n_known :]
        self._n_known = len(whole)
        if whole == window:
            self._from, self._done = self._done, len(self._ids)
            self._n_known = len(self._window())
        found = [at for at in (self._text.find(stop, searched) for stop in self._stop) if at >= 0]
        if found:
            self._text, self._stopped = self._text[: min(found)], True
        return self._stopped

    def take(self, final: bool = False) -> str:
        """Text not taken yet; what could be the beginning of a stop string is held back until `final`."""
        end = len(self._text) if final or self._stopped else max(len(self._text) - self._held, self._n_taken)
        piece = self._text[self._n_taken : end]
        self._n_taken = max(end, self._n_taken)
        return piece

    def _window(self) -> str:
        return self._decoder.decode(self._ids[self._from :], skip_special_tokens=True)


def _whole(text: str) -> str:
    """The text without replacement characters at its end, which stand for a character whose bytes are still to come."""
    return text.rstrip("\ufffd")


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a checkpoint; None if it has no tokenizer files. No code of the checkpoint is run.

    Raises CheckpointError if its files are damaged.
    """
    if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise anything, from OSError to bare Exception
        raise CheckpointError(
            f"the tokenizer in {directory} cannot be loaded: {' '.join(str(error).split())[:200]}",
            change="download it again",
        ) from error


def encode(tokenizer: "PreTrainedTokenizerBase", prompt: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt, as it is or as the user's turn of a chat.

    Raises PromptError if the tokenizer has no ids for it, or the model's chat template is missing or fails.
    """
    text = render(tokenizer, prompt) if chat else prompt
    try:
        return tokenizer.encode(text, add_special_tokens=not chat)
    except Exception as error:  # tokenizers raises bare Exception where a vocabulary lacks what its own rules need
        raise PromptError(
            f"the model's tokenizer failed: {' '.join(str(error).split())[:200]}",
            change="use the tokenizer of this model",
        ) from error

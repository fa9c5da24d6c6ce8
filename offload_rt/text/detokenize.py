"""From a prompt to token ids, and from token ids to text that comes out token by token."""

import json
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.errors import CapacityError, CheckpointError, PromptError

if TYPE_CHECKING:  # it takes a third of a second to load, and a plan needs none
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# A turn of a conversation: its "role", its "content", and what else the model's template knows.
Message = Mapping[str, Any]


class TextStream:
    """The text of a growing answer: never half a character, never past a stop string.

    A token's text may depend on the tokens before it (leading spaces, bytes of one character), so each piece is what the
    text of a short window of tokens gains by the new ones. `tokenizers.decoders.DecodeStream` does not serve: where bytes
    never become a character it raises with byte-fallback tokenizers, and holds back whole characters with all.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # The window begins a few tokens back, so that the first new token is not taken for the beginning of a text.
        self._window, self._n_new = list(prompt[-6:]), 0
        self._n_known = len(self._decoded().rstrip("\ufffd"))
        self._held = max((len(text) for text in self._stop), default=1) - 1
        self._n_taken = 0
        self._is_stopped = False
        self.text = ""  # all so far, a stop string and what follows it cut off

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Take one token; returns whether a stop string is complete, which one that ends too early never is."""
        self._window.append(token)
        self._n_new += 1
        text = self._decoded()
        whole = text.rstrip("\ufffd")  # at the end they stand for a character whose bytes are still to come
        if len(whole) <= self._n_known:
            return False
        n_before = len(self.text)
        self.text += whole[self._n_known :]
        self._n_known = len(whole)
        if whole == text:
            del self._window[: -self._n_new]
            self._n_new, self._n_known = 0, len(self._decoded())
        if may_stop:
            # No stop string ends in the text before this token's, or it has been passed.
            found = [self.text.find(stop, max(n_before - len(stop) + 1, 0)) for stop in self._stop]
            if found := [at for at in found if at >= 0]:
                self.text, self._is_stopped = self.text[: min(found)], True
        return self._is_stopped

    def decode(self, token: int) -> str:
        """The text of one token by itself."""
        return str(self._tokenizer.decode([token]))

    def take(self, final: bool = False) -> str:
        """Text not taken yet; what could be the beginning of a stop string is held back until `final`."""
        held = 0 if final or self._is_stopped else self._held
        start, self._n_taken = self._n_taken, max(len(self.text) - held, self._n_taken)
        return self.text[start : self._n_taken]

    def _decoded(self) -> str:
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True))


def load_tokenizer(path: Path) -> "PreTrainedTokenizerBase | None":
    """The tokenizer of a checkpoint, a directory or GGUF file; None if there is none in it. No code of the checkpoint is run.

    Raises CheckpointError if it is damaged.
    """
    names = ("tokenizer.json", "tokenizer.model", "vocab.json")
    if path.is_dir() and not any((path / name).exists() for name in names):
        return None
    from transformers import AutoTokenizer

    try:
        if path.is_file():
            return _of_gguf(path)
        options = {"trust_remote_code": False, "local_files_only": True}
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, config=_type_of_model(path), **options)
        return found
    except Exception as error:  # transformers and tokenizers raise anything, from OSError to bare Exception
        problem = f"the tokenizer in {path} cannot be loaded: {_brief(error)}"
        raise CheckpointError(problem, change="download it again") from error


def _type_of_model(path: Path) -> "PreTrainedConfig | None":
    """A config of the model's type alone, where tokenizer_config.json names the class; None: transformers reads the whole.

    The whole config loads the model's config class, which takes longer than the tokenizer itself.
    """
    about, config = path / "tokenizer_config.json", path / "config.json"
    named = json.loads(about.read_text(encoding="utf-8")).get("tokenizer_class") if about.exists() else None
    if not named or not config.exists():
        return None
    from transformers import PreTrainedConfig

    found = PreTrainedConfig()
    kind = json.loads(config.read_text(encoding="utf-8")).get("model_type", "")
    found.model_type = kind  # type: ignore[misc]  # of this config alone
    return found


def _of_gguf(path: Path) -> "PreTrainedTokenizerBase | None":
    """By transformers' own parts: its AutoTokenizer asks for another package where a file is of an older architecture."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, content, config = get_gguf_tokenizer(str(path))
    if "tokenizer_type" not in content:
        return None
    backend, more = convert_gguf_tokenizer(architecture, content)
    settings = {"tokenizer_object": backend, **config, **more}
    return PreTrainedTokenizerFast(**settings)  # type: ignore[no-untyped-call]  # theirs


def encode(
    tokenizer: "PreTrainedTokenizerBase", text: str, n_most: float = inf, add_special_tokens: bool = True
) -> list[int]:
    """Token ids of a text of at most so many characters.

    Raises PromptError if the tokenizer has no ids for it, CapacityError if it is longer.
    """
    if len(text) > n_most:
        need = f"at most {n_most} characters, what the context holds of the longest tokens"
        raise CapacityError("the prompt is too long", need=need, have=str(len(text)), change="shorten it")
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except Exception as error:  # tokenizers raises bare Exception where a vocabulary lacks what its own rules need
        problem = f"the model's tokenizer failed: {_brief(error)}"
        raise PromptError(problem, change="use the tokenizer of this model") from error


def encode_chat(
    tokenizer: "PreTrainedTokenizerBase", messages: Sequence[Message], options: Mapping[str, Any], n_most: float = inf
) -> list[int]:
    """Token ids of a conversation through the model's chat template, which transformers renders in a sandbox of jinja.

    options  of `apply_chat_template`, and variables of the template
    Raises PromptError if the template is missing or fails, CapacityError for more than `n_most` characters.
    """
    change = "use another model, or give the whole text as a prompt in place of a chat"
    if not (tokenizer.chat_template or options.get("chat_template")):
        raise PromptError("the model has no chat template", change=change)
    try:
        text = tokenizer.apply_chat_template([dict(one) for one in messages], **{**options, "tokenize": False})
    except Exception as error:  # a template is a program: it raises anything
        raise PromptError(f"the model's chat template failed: {_brief(error)}", change=change) from error
    return encode(tokenizer, str(text), n_most, add_special_tokens=False)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__

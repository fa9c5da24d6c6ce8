"""Sampling parameters and output formats of a request."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from offload_rt.config import check_settings, flag_of, setting
from offload_rt.errors import SettingsError


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(","))


def _bias_by_id(text: str) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in dict(json.loads(text)).items()}


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a setting. Raises SettingsError unless it is a list."""
    if value is None:
        return ()
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise SettingsError(f"{name} is {value!r}", need="a list", change="give a list")
    return tuple(value)


def _each(holds: Callable[[Any], Any]) -> Callable[[Iterable[Any]], bool]:
    return lambda items: all(map(holds, items))


_N_TOKENS = 64
# Fields of SamplingParams with defaults in the model's generation_config.json.
LEFT_TO_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ELSE = "; default: from generation_config.json, else"
# Names, check and required value of the fields.
_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_tokens max_new_tokens n", lambda n: n >= 1, "at least 1"),
    ("temperature min_tokens", lambda x: 0 <= x < math.inf, "at least 0"),
    ("top_p", lambda x: 0 < x <= 1, "above 0 and at most 1"),
    ("top_k logprobs prompt_logprobs", lambda n: n >= -1, "at least 0, or -1"),
    ("min_p", lambda x: 0 <= x <= 1, "between 0 and 1"),
    ("repetition_penalty", lambda x: 0.01 <= x <= 100, "between 0.01 and 100"),
    ("presence_penalty frequency_penalty", lambda x: -2 <= x <= 2, "between -2 and 2"),
    (
        "logit_bias",
        lambda bias: all(
            isinstance(token, int) and (x == -math.inf or abs(x) <= 100)
            for token, x in bias.items()
        ),
        "a number from -100 to 100, or -inf, for each token id",
    ),
    ("stop", _each(lambda text: isinstance(text, str) and text), "texts that are not empty"),
    ("bad_words", _each(str.strip), "texts that are not blank"),
    (
        "stop_token_ids allowed_token_ids",
        _each(lambda token: isinstance(token, int) and token >= 0),
        "token ids",
    ),
    ("bad_words_ids", _each(lambda word: word and min(word) >= 0), "non-empty lists of token ids"),
    ("seed", lambda n: 0 <= n < 2**63, "between 0 and 2**63 - 1"),
)


@dataclass(frozen=True)
class StructuredOutputs:
    """Format of an answer, with the names of vLLM. Exactly one format is required.

    json         JSON schema, as an object or as JSON text
    regex        regular expression in the syntax of Rust
    choice       texts
    grammar      Lark or GBNF grammar
    json_object  any JSON object
    around       Lark grammar of the whole answer, with @answer in place of the format, such as
                 "start: TEXT </think> @answer" and "TEXT: /(.|\\n)*/"; None: only the format
    """

    json: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    json_object: bool = False
    around: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.json, str):
            try:
                object.__setattr__(self, "json", json.loads(self.json))
            except ValueError as error:
                raise SettingsError("--json-schema is not JSON", have=str(error)) from error
        if not isinstance(self.choice, str) and isinstance(self.choice or (), Iterable):
            object.__setattr__(self, "choice", tuple(self.choice or ()))
        formats = {
            "json": isinstance(self.json, Mapping | bool | None),
            "regex": isinstance(self.regex, str | None),
            "choice": isinstance(self.choice, tuple)
            and all(isinstance(text, str) and text for text in self.choice),
            "grammar": isinstance(self.grammar, str | None),
            "json_object": isinstance(self.json_object, bool),
        }
        wrong = [name for name, is_right in formats.items() if not is_right]
        if not isinstance(self.around, str | None):
            wrong.append("around")
        if wrong:
            raise SettingsError(f"structured_outputs: {wrong[0]} has a wrong type")
        given = [name for name in formats if getattr(self, name) not in (None, (), False)]
        if len(given) != 1:
            need = "exactly one of " + ", ".join(formats)
            raise SettingsError("structured_outputs", need=need, have=", ".join(given) or "none")
        if self.json_object:
            object.__setattr__(self, "json", {"type": "object"})
            object.__setattr__(self, "json_object", False)

    @property
    def flag(self) -> str:
        """The format as a setting in messages."""
        if self.json is not None:
            return "--json-schema"
        return "--regex" if self.regex is not None else "--choice" if self.choice else "--grammar"


# Settings that could exclude each token of a grammar, or continue behind its end.
_NOT_WITH_GRAMMAR = (
    "min_tokens", "ignore_eos", "bad_words", "bad_words_ids", "allowed_token_ids",
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of a request, with the names of transformers and vLLM.

    The order equals vLLM's and transformers': logit_bias, repetition, frequency and presence
    penalty, min_tokens, allowed_token_ids, bad_words, temperature, top_k, top_p, min_p.
    An `LLM` replaces None in `LEFT_TO_THE_MODEL` by the value of generation_config.json.
    Without a value there, the field has no effect, and decoding is greedy.
    Without `max_tokens`, None, an answer ends at the end of the context at the latest.
    """

    max_tokens: int | None = setting(_N_TOKENS, "maximum new tokens")
    temperature: float | None = setting(None, f"0 selects the most probable token{_ELSE} 0")
    top_p: float | None = setting(
        None, f"keep the most probable tokens up to this total probability{_ELSE} 1"
    )
    top_k: int | None = setting(
        None, f"keep this many of the most probable tokens; 0 or -1: all{_ELSE} all"
    )
    min_p: float | None = setting(
        None, f"keep tokens with at least this share of the maximum probability{_ELSE} 0"
    )
    repetition_penalty: float | None = setting(
        None, f"above 1: make earlier tokens less probable{_ELSE} 1"
    )
    presence_penalty: float = setting(0.0, "subtracted from the logits of tokens in the answer")
    frequency_penalty: float = setting(
        0.0, "subtracted from logits for each occurrence in the answer"
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, 'added to the logits of tokens, like {"50256": -100}', parse=_bias_by_id
    )
    min_tokens: int = setting(0, "minimum tokens before the end")
    ignore_eos: bool = setting(False, "continue after the model's end tokens")
    stop: tuple[str, ...] = setting((), "end before this text (repeatable)")
    stop_token_ids: tuple[int, ...] = setting((), "end after this token (repeatable)")
    bad_words: tuple[str, ...] = setting((), "never produce this text (repeatable)")
    bad_words_ids: tuple[tuple[int, ...], ...] = setting(
        (), "never produce these consecutive token ids, like 15,7 (repeatable)", parse=_token_ids
    )
    allowed_token_ids: tuple[int, ...] = setting(
        (), "produce only these tokens (repeatable); default: all"
    )
    seed: int | None = setting(None, "seed of the random numbers")
    n: int = setting(1, "number of answers; answer i uses the seed plus i")
    logprobs: int | None = setting(
        None,
        "with --json: log-probabilities of each token and of this many most probable tokens;"
        " -1: all",
    )
    prompt_logprobs: int | None = setting(None, "the same for tokens of the prompt")
    max_new_tokens: int | None = setting(None, "transformers' name of --max-tokens")
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        check_settings(self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "bad_words_ids", "allowed_token_ids"):
            object.__setattr__(self, name, _items(name, getattr(self, name)))
        words = tuple(_items("bad_words_ids", word) for word in self.bad_words_ids)
        object.__setattr__(self, "bad_words_ids", words)
        if self.max_new_tokens is not None:
            if self.max_tokens not in (_N_TOKENS, self.max_new_tokens):
                names = "max_tokens and max_new_tokens"
                raise SettingsError(names, need="a single value", have="two values")
            object.__setattr__(self, "max_tokens", self.max_new_tokens)
            object.__setattr__(self, "max_new_tokens", None)  # `replace` can change max_tokens
        for names, holds, need in _RANGES:
            for name in names.split():
                value = getattr(self, name)
                try:
                    is_right = value is None or holds(value)
                except (TypeError, AttributeError):
                    is_right = False
                if not is_right:
                    change = f"change {flag_of(name)}"
                    raise SettingsError(f"{name} is {value!r}", need=need, change=change)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                have = type(self.structured_outputs).__name__
                raise SettingsError("structured_outputs", need="StructuredOutputs", have=have)
            wrong = [name for name in _NOT_WITH_GRAMMAR if getattr(self, name)]
            if -math.inf in (self.logit_bias or {}).values():
                wrong.append("logit_bias of -inf")
            if wrong:
                change = f"leave {wrong[0]} out"
                raise SettingsError(f"structured_outputs with {wrong[0]}", change=change)

    def __repr__(self) -> str:
        changed = [item for item in fields(self) if getattr(self, item.name) != item.default]
        texts = (f"{item.name}={getattr(self, item.name)!r}" for item in changed)
        return f"SamplingParams({', '.join(texts)})"

    @property
    def looks_back(self) -> bool:
        """Whether settings depend on earlier tokens or on their number."""
        return (
            self.repetition_penalty not in (None, 1.0)
            or bool(self.presence_penalty or self.frequency_penalty or self.min_tokens)
            or any(len(word) > 1 for word in self.bad_words_ids)
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before the temperature applies."""
        return self.looks_back or bool(
            self.logit_bias or self.bad_words_ids or self.allowed_token_ids
        )

    def left_to(self, defaults: "SamplingParams") -> dict[str, Any]:
        """Return values of `defaults` for fields without a value, by name."""
        return {
            name: value
            for name in LEFT_TO_THE_MODEL
            if getattr(self, name) is None and (value := getattr(defaults, name)) is not None
        }

"""Frozen settings, validated on construction. Their fields define the command-line flags."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from offload_rt.errors import SettingsError

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30,
    "ti": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", re.IGNORECASE)


# Fewer bytes without a unit are a forgotten unit.
_LEAST_WITHOUT_UNIT = 1000


def parse_size(text: str | int) -> int:
    """Parse bytes from `"22GiB"`, `"1.5 GB"`, `"800M"` or a number of bytes.

    Raises SettingsError for any other text, and for small numbers in a text without a unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise SettingsError(f"{text!r} is not a size", change='write it like "22GiB" or "800MB"')
    nbytes = int(float(match.group(1)) * _UNITS[match.group(2).lower()])
    if 0 < nbytes < _LEAST_WITHOUT_UNIT and str(text).strip()[-1].isdigit():
        raise SettingsError(
            f"{text!r} has no unit and means bytes",
            change=f'write it like "{str(text).strip()}GiB"',
        )
    return nbytes


def format_size(nbytes: float) -> str:
    """Format bytes as `"1.50 GiB"`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} B"


def setting(
    default: Any,
    text: str,
    *,
    parse: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a field with help text, parser and choices of its flag."""
    return field(default=default, metadata={"help": text, "parse": parse, "choices": choices})


_TYPES: dict[type, tuple[type, str]] = {
    str: (str, "a text"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
}


def _check_types(settings: Any) -> None:
    """Raise SettingsError for a number, text or bool of a wrong type; convert paths to texts."""
    for item in fields(settings):
        kinds = [kind for kind in get_args(item.type) or (item.type,) if kind is not NoneType]
        value = getattr(settings, item.name)
        is_absent = value is None and item.default is not MISSING
        if is_absent or not all(kind in _TYPES for kind in kinds):
            continue
        if isinstance(value, os.PathLike) and str in kinds:
            object.__setattr__(settings, item.name, value := os.fspath(value))
        # A bool is an Integral, too.
        fitting = [kind for kind in kinds if isinstance(value, bool) == (kind is bool)]
        if not any(isinstance(value, _TYPES[kind][0]) for kind in fitting):
            need = " or ".join(_TYPES[kind][1] for kind in kinds)
            flag = flag_of(item.name)
            raise SettingsError(f"{flag} is {value!r}", need=need, change=f"change {flag}")


@dataclass(frozen=True)
class EngineConfig:
    """Engine settings: arguments of `LLM` and flags of the command line."""

    model: str = setting(MISSING, "directory of a checkpoint, a GGUF file, or a hub id")
    draft_model: str | None = setting(
        None, "directory, GGUF file or hub id of a draft model with the same tokenizer, or of heads"
    )
    device: str = setting("auto", "where the model computes", choices=("auto", "cpu", "cuda"))
    dtype: str = setting(
        "auto", "dtype of the computation; auto: the checkpoint's",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
    )  # fmt: skip
    device_memory: str | int | None = setting(
        None,
        'memory budget on the device, like "22GiB"; on a CPU, of the whole run; default: free'
        " memory, less a margin",
    )
    host_memory: str | int | None = setting(
        None, "pinned CPU memory for weights, with a GPU; default: free memory, less a margin"
    )
    kv_memory: str | int | None = setting(
        None,
        "device memory for keys and values; each pass reads further rows from the host, on a CPU"
        " from the disk; default: all that fits",
    )
    kv_dtype: str = setting(
        "auto",
        "dtype of keys and values beyond the device; fp8 halves the traffic and is not exact;"
        " auto: the model's dtype",
        choices=("auto", "fp8"),
    )
    max_model_len: int | None = setting(
        None,
        "maximum tokens of prompt and answer together; default: the model's limit, or the rows"
        " cached by an eighth of the budget",
        parse=int,
    )
    max_num_seqs: int = setting(
        1,
        "sequences of this length in a batch; more if shorter sequences use the same memory",
        parse=int,
    )
    link_format: str = setting(
        "auto",
        "format of streamed weights on the link; lossless: about 7/10 of the bytes, decoded bit"
        " for bit; raw: unchanged; auto: lossless if `offload-rt convert` wrote a sidecar and"
        " measured rates favour it",
        choices=("auto", "lossless", "raw"),
    )
    sidecar: str | None = setting(
        None, "directory of the sidecar; default: lossless, in the model's directory"
    )
    drafter: str = setting(
        "auto", "drafter of the tree; auto: the best drafter for the given models"
    )
    rule: str = setting("auto", "verification rule of the tree; auto: the drafter's default")
    tree_size: int | None = setting(
        None, "nodes of the drafted tree; default: chosen from measurements", parse=int
    )
    tree_depth: int | None = setting(
        None, "levels of the drafted tree; default: chosen from measurements", parse=int
    )
    draft_context: int | None = setting(
        None,
        "tokens in a drafter's view of the target's cache; default: set by the drafter",
        parse=int,
    )
    draft_quantize: str = setting(
        "auto",
        "quantise an unquantised draft model of a native family while it is loaded; the output"
        " stays exact; auto: on a GPU, if fewer streamed bytes outweigh the loss of accepted"
        " tokens",
        choices=("auto", "none", "int4", "int8", "fp8"),
    )
    learn_draft: str = setting(
        "off",
        "train the draft model on the target's predictions while waiting for the link; keep:"
        " store the result for later runs",
        choices=("off", "on", "keep"),
    )
    torch_products: bool = setting(
        False,
        "let torch multiply 16 and more rows of 16-bit weights on a CPU; faster with AMX, but"
        " speculation repeats plain decoding only up to rounding",
    )
    exact_parallel: bool = setting(
        False,
        "under torchrun, shard every matrix by outputs, so that sums equal those of a single rank",
    )
    split_draft: str = setting(
        "auto",
        "under torchrun, shard the draft model too; off: run it on rank 0; auto: the faster"
        " placement",
        choices=("auto", "on", "off"),
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only files in the hub cache")
    chat_template: str | None = setting(
        None, "file with a Jinja chat template; default: the model's own"
    )
    pipeline: int = setting(
        1,
        "number of pipeline stages, equal to the ranks started by torchrun; for machines on a"
        " slow network: each rank owns consecutive layers and sends hidden states to the next rank",
        parse=int,
    )
    mirror: str | None = setting(
        None,
        "directories on other disks with copies of the checkpoint and its sidecar, separated by"
        " commas; layers are read from all disks at once",
    )
    max_image_pixels: int = setting(
        1_605_632,
        "pixels of an image; larger images are scaled down; 0: text only, without the vision tower",
        parse=int,
    )

    def __post_init__(self) -> None:
        _check_types(self)
        for item in fields(self):
            choices = item.metadata["choices"]
            value = getattr(self, item.name)
            if choices and value not in choices:
                need = "one of " + ", ".join(choices)
                raise SettingsError(
                    f"{flag_of(item.name)} is {value!r}",
                    need=need,
                    change=f"change {flag_of(item.name)}",
                )
        for name in ("device_memory", "host_memory", "kv_memory"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, parse_size(value))
        for name in (
            "max_model_len",
            "max_num_seqs",
            "tree_size",
            "tree_depth",
            "draft_context",
            "pipeline",
        ):
            check_positive(name, getattr(self, name))
        if self.max_image_pixels < 0:
            change = "raise --max-image-pixels"
            have = str(self.max_image_pixels)
            raise SettingsError("--max-image-pixels", need="at least 0", have=have, change=change)

    @property
    def device_nbytes(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else parse_size(self.device_memory)

    @property
    def host_nbytes(self) -> int | None:
        """`host_memory` in bytes."""
        return None if self.host_memory is None else parse_size(self.host_memory)

    @property
    def kv_nbytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_size(self.kv_memory)


def _token_ids(text: str) -> tuple[int, ...]:
    return tuple(int(token) for token in text.split(","))


def _bias_by_id(text: str) -> dict[int, float]:
    return {int(token): float(bias) for token, bias in dict(json.loads(text)).items()}


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
        lambda bias: all(isinstance(id, int) and (x == -math.inf or abs(x) <= 100) for id,
            x in bias.items()),
        "a number from -100 to 100, or -inf, for each token id",
    ),
    (
        "stop",
        lambda texts: all(isinstance(text, str) and text for text in texts),
        "texts that are not empty",
    ),
    ("bad_words", lambda words: all(word.strip() for word in words), "texts that are not blank"),
    ("stop_token_ids allowed_token_ids", lambda ids: all(isinstance(token, int) and token >= 0
        for token in ids), "token ids"),
    ("bad_words_ids", lambda words: all(word and min(word) >= 0 for word in words), "non-empty "
                                                                                    "lists of "
                                                                                    "token ids"),
    ("seed", lambda n: 0 <= n < 2**63, "between 0 and 2**63 - 1"),
)  # fmt: skip


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
            "json": isinstance(self.json, Mapping | bool) or self.json is None,
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

    max_tokens: int | None = setting(_N_TOKENS, "maximum new tokens", parse=int)
    temperature: float | None = setting(
        None, f"0 selects the most probable token{_ELSE} 0", parse=float
    )
    top_p: float | None = setting(
        None,
        f"keep the most probable tokens up to this total probability{_ELSE} 1",
        parse=float,
    )
    top_k: int | None = setting(
        None, f"keep this many of the most probable tokens; 0 or -1: all{_ELSE} all", parse=int
    )
    min_p: float | None = setting(
        None,
        f"keep tokens with at least this share of the maximum probability{_ELSE} 0",
        parse=float,
    )
    repetition_penalty: float | None = setting(
        None, f"above 1: make earlier tokens less probable{_ELSE} 1", parse=float
    )
    presence_penalty: float = setting(
        0.0, "subtracted from the logits of tokens in the answer", parse=float
    )
    frequency_penalty: float = setting(
        0.0, "subtracted from logits for each occurrence in the answer", parse=float
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, 'added to the logits of tokens, like {"50256": -100}', parse=_bias_by_id
    )
    min_tokens: int = setting(0, "minimum tokens before the end", parse=int)
    ignore_eos: bool = setting(False, "continue after the model's end tokens")
    stop: tuple[str, ...] = setting((), "end before this text (repeatable)")
    stop_token_ids: tuple[int, ...] = setting((), "end after this token (repeatable)", parse=int)
    bad_words: tuple[str, ...] = setting((), "never produce this text (repeatable)")
    bad_words_ids: tuple[tuple[int, ...], ...] = setting(
        (),
        "never produce these consecutive token ids, like 15,7 (repeatable)",
        parse=_token_ids,
    )
    allowed_token_ids: tuple[int, ...] = setting(
        (), "produce only these tokens (repeatable); default: all", parse=int
    )
    seed: int | None = setting(None, "seed of the random numbers", parse=int)
    n: int = setting(1, "number of answers; answer i uses the seed plus i", parse=int)
    logprobs: int | None = setting(
        None,
        "with --json: log-probabilities of each token and of this many most probable tokens;"
        " -1: all",
        parse=int,
    )
    prompt_logprobs: int | None = setting(None, "the same for tokens of the prompt", parse=int)
    max_new_tokens: int | None = setting(None, "transformers' name of --max-tokens", parse=int)
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        _check_types(self)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            object.__setattr__(self, name, tuple(self._items(name)))
        words = [self._items("bad_words_ids", word) for word in self._items("bad_words_ids")]
        object.__setattr__(self, "bad_words_ids", tuple(map(tuple, words)))
        if self.max_new_tokens is not None:
            if self.max_tokens not in (_N_TOKENS, self.max_new_tokens):
                raise SettingsError(
                    "max_tokens and max_new_tokens", need="a single value", have="two values"
                )
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
                    raise SettingsError(
                        f"{name} is {value!r}", need=need, change=f"change {flag_of(name)}"
                    )

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

    def _items(self, name: str, value: Any = None) -> Sequence[Any]:
        """Return a setting, or a given part of it, as a list. Raises SettingsError."""
        value = getattr(self, name) if value is None else value
        if value is None:
            return ()
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise SettingsError(f"{name} is {value!r}", need="a list", change="give a list")
        return list(value)

    @property
    def looks_back(self) -> bool:
        """Whether settings depend on earlier tokens or on their number."""
        is_plain = (
            self.repetition_penalty in (None, 1.0)
            and not self.presence_penalty
            and not self.frequency_penalty
        )
        return (
            not is_plain or self.min_tokens > 0 or any(len(word) > 1 for word in self.bad_words_ids)
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


def check_positive(name: str, value: int | None) -> None:
    """Raise SettingsError unless the value is None or a positive integer."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise SettingsError(
            f"{flag_of(name)} is {value!r}", need="an integer", change=f"change {flag_of(name)}"
        )
    if value is not None and value < 1:
        raise SettingsError(
            f"{flag_of(name)} is {value}", need="at least 1", change=f"raise {flag_of(name)}"
        )


def check_folder(flag: str, path: str | Path) -> None:
    """Raise SettingsError if the folder of an output file does not exist."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise SettingsError(
            f"{flag} {path}",
            need="an existing folder",
            have=f"no {folder}",
            change="create the folder",
        )


def flag_of(name: str) -> str:
    """Return the flag of a field: `--max-model-len` for `max_model_len`."""
    return "--" + name.replace("_", "-")

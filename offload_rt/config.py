"""Frozen settings, checked when they are made. The flags of the command line are their fields."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from offload_rt.errors import SettingsError

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30,
    "ti": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?)b?\s*", re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes from `"22GiB"`, `"1.5 GB"`, `"800M"` or a number of bytes.

    Raises SettingsError for anything else.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise SettingsError(f"{text!r} is not a size", change='write it like "22GiB" or "800MB"')
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


def format_size(nbytes: float) -> str:
    """`"1.50 GiB"` for people."""
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
    """A field with what its command-line flag needs: help text, type, choices."""
    return field(default=default, metadata={"help": text, "parse": parse, "choices": choices})


@dataclass(frozen=True)
class EngineConfig:
    """What the engine is built from; the arguments of `LLM` and the flags of the command line."""

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
        'memory budget on the device, like "22GiB"; on a CPU, of the whole run; default: what is'
        " free, less a margin",
    )
    host_memory: str | int | None = setting(
        None, "pinned CPU memory for weights, with a GPU; default: what is free, less a margin"
    )
    kv_memory: str | int | None = setting(
        None, "of the device's memory, what keys and values may take; the others come from the "
              "host, on a CPU from the disk, "
        "in each pass; default: all that fits",
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", "of keys and values beyond the device; fp8 halves what comes, and is not exact; "
                "auto: the dtype",
        choices=("auto", "fp8"),
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, parse=int,
        text="most tokens of prompt and answer together; default: the model's limit, or what an "
             "eighth of the budget caches",
    )  # fmt: skip
    max_num_seqs: int = setting(
        1,
        parse=int,
        text=(
            "sequences of this length that run together; of shorter ones as many as take the same"
            " room"
        ),
    )
    link_format: str = setting(
        "auto", choices=("auto", "lossless", "raw"),
        text="how streamed weights cross the link: encoded in about 7/10 of their bytes and "
             "decoded bit for bit, or as they "
        "are; auto: encoded where `offload-rt convert` has written a sidecar and measured rates "
        "make that faster",
    )  # fmt: skip
    sidecar: str | None = setting(
        None, "directory of that sidecar; default: lossless, in that of the model"
    )
    drafter: str = setting(
        "auto", "who drafts the tree; auto: the best that the given models allow"
    )
    rule: str = setting("auto", "how a drafted tree is verified; auto: the drafter's best")
    tree_size: int | None = setting(
        None, "nodes of the drafted tree; default: chosen from measurements", parse=int
    )
    tree_depth: int | None = setting(
        None, "levels of the drafted tree; default: chosen from measurements", parse=int
    )
    draft_context: int | None = setting(
        None,
        "tokens that a draft model, or a drafter of long texts, attends to; default: the"
        " drafter's own",
        parse=int,
    )
    learn_draft: str = setting(
        "off", "let a draft model learn from the target's predictions in time that the link "
               "leaves; keep: for later runs, too",
        choices=("off", "on", "keep"),
    )  # fmt: skip
    batch_invariant: bool = setting(
        False, "on a CPU, multiply many rows by our kernel even if torch's product is measured to "
               "be much faster, so that "
        "speculation repeats plain decoding bit for bit",
    )  # fmt: skip
    exact_parallel: bool = setting(
        False,
        "under torchrun, divide every matrix by its outputs: each sum is one rank's, as if it"
        " computed alone",
    )
    split_draft: str = setting(
        "auto", choices=("auto", "on", "off"),
        text="under torchrun, divide the draft model among the ranks too; off: the first one has "
             "it; auto: whichever is faster",
    )  # fmt: skip
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only what the hub cache already holds")
    pipeline: int = setting(
        1, parse=int, text="divide the layers among so many ranks, all that torchrun has started, "
                           "as of machines joined by a "
        "slow network: each holds what fits of its own, and hidden states go from one to the next",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for item in fields(self):
            choices = item.metadata["choices"]
            value = getattr(self, item.name)
            if choices and value not in choices:
                need = "one of " + ", ".join(choices)
                raise SettingsError(
                    f"{flag_of(item.name)} is {value!r}", need=need, change="use one of these"
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
# Fields of SamplingParams that generation_config.json of a model decides where they are None.
LEFT_TO_THE_MODEL = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_ELSE = "; default: from generation_config.json, else"
# What its fields may be.
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
    ("stop", all, "texts that are not empty"),
    ("bad_words", lambda words: all(word.strip() for word in words), "texts that are not blank"),
    ("stop_token_ids allowed_token_ids", lambda ids: all(token >= 0 for token in ids), "token ids"),
    ("bad_words_ids", lambda words: all(word and min(word) >= 0 for word in words), "non-empty "
                                                                                    "lists of "
                                                                                    "token ids"),
    ("seed", lambda n: 0 <= n < 2**63, "between 0 and 2**63 - 1"),
)  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, by transformers' and vLLM's names, and when a text ends.

    They apply in the order of vLLM and transformers: logit_bias, repetition, frequency and presence
    penalty, min_tokens, allowed_token_ids, bad_words, temperature, top_k, top_p, min_p. A None
    among `LEFT_TO_THE_MODEL` is what generation_config.json says in an `LLM`; where that says
    nothing, it changes nothing, and the most probable token is taken.
    """

    max_tokens: int | None = setting(
        _N_TOKENS, "most tokens to produce; None in Python: all there is room for", parse=int
    )
    temperature: float | None = setting(
        None, f"0 takes the most probable token{_ELSE} 0", parse=float
    )
    top_p: float | None = setting(
        None,
        f"keep the most probable tokens that together reach this probability{_ELSE} 1",
        parse=float,
    )
    top_k: int | None = setting(
        None, f"keep this many of the most probable tokens; 0 or -1: all{_ELSE} all", parse=int
    )
    min_p: float | None = setting(
        None,
        f"keep tokens at least this share of the most probable one's probability{_ELSE} 0",
        parse=float,
    )
    repetition_penalty: float | None = setting(
        None, f"above 1: make tokens that occurred already less probable{_ELSE} 1", parse=float
    )
    presence_penalty: float = setting(
        0.0, "taken off the logits of tokens that the answer has", parse=float
    )
    frequency_penalty: float = setting(
        0.0, "taken off them for each time that the answer has the token", parse=float
    )
    logit_bias: Mapping[int, float] | None = setting(
        None, 'added to the logits of tokens, like {"50256": -100}', parse=_bias_by_id
    )
    min_tokens: int = setting(0, "no end before so many tokens", parse=int)
    ignore_eos: bool = setting(False, "go on after the model's end tokens")
    stop: tuple[str, ...] = setting((), "end before this text (may be given several times)")
    stop_token_ids: tuple[int, ...] = setting(
        (), "end after this token (may be given several times)", parse=int
    )
    bad_words: tuple[str, ...] = setting((), "never produce this text (may be given several times)")
    bad_words_ids: tuple[tuple[int, ...], ...] = setting(
        (),
        "never produce these token ids in a row, like 15,7 (may be given several times)",
        parse=_token_ids,
    )
    allowed_token_ids: tuple[int, ...] = setting(
        (), "produce this token only (may be given several times); default: all", parse=int
    )
    seed: int | None = setting(None, "makes sampling repeatable", parse=int)
    n: int = setting(1, "answers; the seed of each is one above that of the one before", parse=int)
    logprobs: int | None = setting(
        None,
        "--json has the log-probability of each token and of so many of the most probable; -1:"
        " of all",
        parse=int,
    )
    prompt_logprobs: int | None = setting(None, "the same of the prompt's tokens", parse=int)
    max_new_tokens: int | None = setting(None, "--max-tokens by transformers' name", parse=int)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name) or ()))
        object.__setattr__(self, "bad_words_ids", tuple(tuple(word) for word in self.bad_words_ids))
        if self.max_new_tokens is not None:
            if self.max_tokens not in (_N_TOKENS, self.max_new_tokens):
                raise SettingsError(
                    "max_tokens and max_new_tokens", need="only one of them", have="both"
                )
            object.__setattr__(self, "max_tokens", self.max_new_tokens)
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

    @property
    def looks_back(self) -> bool:
        """Whether the distribution of a token depends, beyond the model, on the tokens before it or
        on their number.
        """
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
        """What these leave open and `defaults` decide, by name."""
        found = {
            name: getattr(defaults, name)
            for name in LEFT_TO_THE_MODEL
            if getattr(self, name) is None
        }
        return {name: value for name, value in found.items() if value is not None}


def check_positive(name: str, value: int | None) -> None:
    """Raises SettingsError for a setting of this name that is neither left out nor a whole number
    above 0.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise SettingsError(
            f"{flag_of(name)} is {value!r}", need="a whole number", change="give one"
        )
    if value is not None and value < 1:
        raise SettingsError(
            f"{flag_of(name)} is {value}", need="at least 1", change=f"raise {flag_of(name)}"
        )


def check_folder(flag: str, path: str | Path) -> None:
    """Raises SettingsError where the folder of a file to be written does not exist."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        raise SettingsError(
            f"{flag} {path}", need="a folder that exists", have=f"no {folder}", change="make it"
        )


def flag_of(name: str) -> str:
    """The command-line flag of a field: `max_model_len` is `--max-model-len`."""
    return "--" + name.replace("_", "-")

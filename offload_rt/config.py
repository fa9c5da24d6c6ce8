"""Frozen settings, checked when they are made. The flags of the command line are their fields."""

import math
import re
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from offload_rt.errors import SettingsError

_UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
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


def setting(default: Any, text: str, *, parse: type | None = None, choices: tuple[str, ...] = ()) -> Any:
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
        'memory budget on the device, like "22GiB"; on a CPU, of the whole run; default: what is free, less a margin',
    )
    host_memory: str | int | None = setting(
        None, "pinned CPU memory for weights, with a GPU; default: what is free, less a margin"
    )
    kv_memory: str | int | None = setting(
        None, "of the device's memory, what keys and values may take; the others come from the host, on a CPU from the disk, "
        "in each pass; default: all that fits",
    )  # fmt: skip
    kv_dtype: str = setting(
        "auto", "of keys and values beyond the device; fp8 halves what comes, and is not exact; auto: the dtype",
        choices=("auto", "fp8"),
    )  # fmt: skip
    max_model_len: int | None = setting(
        None, parse=int,
        text="most tokens of prompt and answer together; default: the model's limit, or what an eighth of the budget caches",
    )  # fmt: skip
    link_format: str = setting(
        "auto", choices=("auto", "lossless", "raw"),
        text="how streamed weights cross the link: encoded in about 7/10 of their bytes and decoded bit for bit, or as they "
        "are; auto: encoded where `offload-rt convert` has written a sidecar",
    )  # fmt: skip
    sidecar: str | None = setting(None, "directory of that sidecar; default: lossless, in that of the model")
    drafter: str = setting("auto", "who drafts the tree; auto: the best that the given models allow")
    rule: str = setting("auto", "how a drafted tree is verified; auto: the drafter's best")
    tree_size: int | None = setting(None, "nodes of the drafted tree; default: chosen from measurements", parse=int)
    tree_depth: int | None = setting(None, "levels of the drafted tree; default: chosen from measurements", parse=int)
    draft_context: int | None = setting(
        None, "tokens that a draft model, or a drafter of long texts, attends to; default: the drafter's own", parse=int
    )
    revision: str | None = setting(None, "branch, tag or commit on the hub")
    offline: bool = setting(False, "use only what the hub cache already holds")

    def __post_init__(self) -> None:
        for item in fields(self):
            choices, value = item.metadata["choices"], getattr(self, item.name)
            if choices and value not in choices:
                need = "one of " + ", ".join(choices)
                raise SettingsError(f"{flag_of(item.name)} is {value!r}", need=need, change="use one of these")
        for name in ("device_memory", "host_memory", "kv_memory"):
            value = getattr(self, name)
            if value is not None:
                check_positive(name, parse_size(value))
        for name in ("max_model_len", "tree_size", "tree_depth", "draft_context"):
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


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen: penalty, temperature, top_k, top_p, min_p, in the order of transformers."""

    max_new_tokens: int = setting(64, "most tokens to produce", parse=int)
    temperature: float = setting(0.0, "0 takes the most probable token", parse=float)
    top_p: float = setting(1.0, "keep the most probable tokens that together reach this probability", parse=float)
    top_k: int = setting(0, "keep this many of the most probable tokens; 0: all", parse=int)
    min_p: float = setting(0.0, "keep tokens at least this share of the most probable one's probability", parse=float)
    repetition_penalty: float = setting(1.0, "above 1: make tokens that occurred already less probable", parse=float)
    seed: int | None = setting(None, "makes sampling repeatable", parse=int)
    stop: tuple[str, ...] = setting((), "end before this text (may be given several times)")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
        )
        for name, holds, need in checks:
            if not holds:
                raise SettingsError(f"{name} is {getattr(self, name)!r}", need=need, change=f"set {name} accordingly")


def check_positive(name: str, value: int | None) -> None:
    """Raises SettingsError for a setting of this name that is neither left out nor a whole number above 0."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise SettingsError(f"{flag_of(name)} is {value!r}", need="a whole number", change="give one")
    if value is not None and value < 1:
        raise SettingsError(f"{flag_of(name)} is {value}", need="at least 1", change=f"raise {flag_of(name)}")


def flag_of(name: str) -> str:
    """The command-line flag of a field: `max_model_len` is `--max-model-len`."""
    return "--" + name.replace("_", "-")

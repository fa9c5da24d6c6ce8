"""Frozen settings, validated on construction. Their fields define the command-line flags."""

import os
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields
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
    if 0 < nbytes < _LEAST_WITHOUT_UNIT and (number := str(text).strip())[-1].isdigit():
        change = f'write it like "{number}GiB"'
        raise SettingsError(f"{text!r} has no unit and means bytes", change=change)
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
    least: int | None = None,
) -> Any:
    """Declare a field: help text, parser (see `parser_of`) and choices of its flag, least value."""
    metadata = {"help": text, "parse": parse, "choices": choices, "least": least}
    return field(default=default, metadata=metadata)


_TYPES: dict[type, tuple[type, str]] = {
    str: (str, "a text"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    bool: (bool, "True or False"),
}


def parser_of(item: Field[Any]) -> Callable[[str], Any]:
    """Return the parser of a setting's flag: its own, or the type of its values."""
    kind, *_ = get_args(item.type) or (item.type,)
    return item.metadata["parse"] or (kind if kind in (int, float, bool) else str)


def check_settings(settings: Any) -> None:
    """Raise SettingsError for a wrong type, choice or least value; convert paths to texts."""
    for item in fields(settings):
        flag = flag_of(item.name)
        kinds = [kind for kind in get_args(item.type) or (item.type,) if kind is not NoneType]
        value = getattr(settings, item.name)
        if (value is None and item.default is not MISSING) or {*kinds} - _TYPES.keys():
            continue
        if isinstance(value, os.PathLike) and str in kinds:
            object.__setattr__(settings, item.name, value := os.fspath(value))
        # A bool is an Integral, too.
        fitting = [kind for kind in kinds if isinstance(value, bool) == (kind is bool)]
        if not any(isinstance(value, _TYPES[kind][0]) for kind in fitting):
            need = " or ".join(_TYPES[kind][1] for kind in kinds)
            raise SettingsError(f"{flag} is {value!r}", need=need, change=f"change {flag}")
        if (choices := item.metadata.get("choices")) and value not in choices:
            need = "one of " + ", ".join(choices)
            raise SettingsError(f"{flag} is {value!r}", need=need, change=f"change {flag}")
        least = item.metadata.get("least")
        if least is not None and (parse_size(value) if isinstance(value, str) else value) < least:
            need = f"at least {least}"
            raise SettingsError(f"{flag} is {value}", need=need, change=f"raise {flag}")


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
        choices=("auto", "bfloat16", "float16", "float32", "float64")
    )  # fmt: skip
    device_memory: str | int | None = setting(
        None,
        'memory budget on the device, like "22GiB"; on a CPU, of the whole run; default: free'
        " memory, less a margin",
        least=1,
    )
    host_memory: str | int | None = setting(
        None,
        "pinned CPU memory for weights, with a GPU; default: free memory, less a margin",
        least=1,
    )
    kv_memory: str | int | None = setting(
        None,
        "device memory for keys and values; each pass reads further rows from the host, on a CPU"
        " from the disk; default: all that fits",
        least=1,
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
        least=1,
    )
    max_num_seqs: int = setting(
        1,
        "sequences of this length in a batch; more if shorter sequences use the same memory",
        least=1,
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
        None, "nodes of the drafted tree; default: chosen from measurements", least=1
    )
    tree_depth: int | None = setting(
        None, "levels of the drafted tree; default: chosen from measurements", least=1
    )
    draft_context: int | None = setting(
        None,
        "tokens in a drafter's view of the target's cache; default: set by the drafter",
        least=1,
    )
    draft_quantize: str = setting(
        "auto",
        "quantise an unquantised draft model of a native family while it is loaded; the output"
        " stays exact; auto: on a GPU, if fewer streamed bytes outweigh the loss of accepted"
        " tokens",
        choices=("auto", "none", "int4", "int8", "fp8"),
    )
    draft_predictions: str | None = setting(
        None,
        "file of the target's predictions after short texts, the first candidates of drafters that"
        " recycle predictions; default: predictions.safetensors in the draft model's directory",
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
    activations: str = setting(
        "exact",
        "int8: round the inputs of the target's products with GGUF types and int8 weights to 8 bits"
        " as in llama.cpp; faster on CPUs without AVX-512, but logits differ from exact products",
        choices=("exact", "int8"),
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
        least=1,
    )
    mirror: str | None = setting(
        None,
        "directories on other disks with copies of the checkpoint and its sidecar, separated by"
        " commas; layers are read from all disks at once",
    )
    max_image_pixels: int = setting(
        1_605_632,
        "pixels of an image; larger images are scaled down; 0: text only, without the vision tower",
        least=0,
    )

    def __post_init__(self) -> None:
        check_settings(self)

    @property
    def device_nbytes(self) -> int | None:
        """`device_memory` in bytes."""
        return None if self.device_memory is None else parse_size(self.device_memory)

    @property
    def kv_nbytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else parse_size(self.kv_memory)


def check_folder(flag: str, path: str | Path) -> None:
    """Raise SettingsError if the folder of an output file does not exist."""
    folder = Path(path).resolve().parent
    if not folder.is_dir():
        need = "an existing folder"
        have = f"no {folder}"
        raise SettingsError(f"{flag} {path}", need=need, have=have, change="create the folder")


def flag_of(name: str) -> str:
    """Return the flag of a field: `--max-model-len` for `max_model_len`."""
    return "--" + name.replace("_", "-")

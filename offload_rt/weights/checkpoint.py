"""Finding a checkpoint and checking all of it before the first weight moves."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

from offload_rt.errors import CheckpointError
from offload_rt.models.families import spec_of
from offload_rt.models.spec import HEAD, ModelSpec
from offload_rt.weights.header import TensorRecord, read_header

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WANTED_FILES = (
    "*.safetensors",
    _INDEX,
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
)
# Bytes of a file that is no weights; the largest tokenizers have some tens of megabytes.
_MOST_TEXT = 1 << 29
# Old Llama checkpoints carry the rotary frequencies, which follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# A number of more digits is no layer's; Python refuses to convert thousands of them.
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose every tensor has been found where it should be.

    layers  one tuple for each layer, in the order of `spec.layer_tensors()`
    non_layer   in the order of `spec.non_layer_tensors()`
    """

    directory: Path
    spec: ModelSpec
    layers: tuple[tuple[TensorRecord, ...], ...]
    non_layer: tuple[TensorRecord, ...]

    @property
    def identity(self) -> str:
        """A name that another checkpoint does not have: the files, their sizes and times."""
        paths = sorted({record.path for records in (*self.layers, self.non_layer) for record in records})
        files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        return hashlib.sha256(repr(files).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(record.stop - record.start for records in (*self.layers, self.non_layer) for record in records)


def locate(model: str, revision: str | None = None, offline: bool = False) -> Path:
    """The local directory of a checkpoint, fetched from the hub where it is not a directory already.

    Raises CheckpointError if there is none.
    """
    try:
        path = Path(model).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a folder that may not be entered, the home of nobody
        raise CheckpointError(f"{model}: {error}", change="give the directory of a checkpoint") from error
    if is_directory:
        return path
    if exists:
        raise CheckpointError(
            f"{model} is a file", need="the directory of a checkpoint", change="give the directory it lies in"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(
            f"no such directory: {model}", change="give the directory of a checkpoint, or a hub id like org/name"
        )
    return _download(model, revision, offline)


def find_config(model: str, revision: str | None = None, offline: bool = False) -> dict[str, Any]:
    """The config of a model whose weights need not be there: of a file, a directory, or the hub.

    Raises CheckpointError if there is none.
    """
    try:
        path = Path(model).expanduser()
        is_file, is_directory = path.is_file(), path.is_dir()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{model}: {error}", change="give a config.json or its directory") from error
    if is_file or is_directory:
        return read_json(path if is_file else path / "config.json")
    if model.startswith((".", "/", "~")) or model.endswith(".json") or model.count("/") != 1:
        raise CheckpointError(
            f"no model called {model}", need="a config.json, its directory, or a hub id like org/name",
            change="give one of these, or the name of a shape that is built in",
        )  # fmt: skip
    fetch = partial(huggingface_hub.hf_hub_download, model, "config.json", revision=revision, local_files_only=offline)
    return read_json(_from_hub(model, offline, fetch))


def _download(model: str, revision: str | None, offline: bool) -> Path:
    patterns = list(_WANTED_FILES)
    return _from_hub(
        model,
        offline,
        lambda: huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, local_files_only=offline
        ),
    )


def _from_hub(model: str, offline: bool, fetch: Callable[[], str]) -> Path:
    """What the hub gives. Raises CheckpointError, in one sentence, where it gives nothing."""
    advice = "check the name, or give the directory of a checkpoint"
    try:
        return Path(fetch())
    except HFValidationError as error:
        raise CheckpointError(f"{model!r} is neither a directory nor a hub id", change=advice) from error
    except GatedRepoError as error:
        raise CheckpointError(
            f"{model} is gated on the hub", change="accept its terms there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(f"{model} is not on the hub", change=f"{advice}; a private one needs HF_TOKEN") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        where = "is not in the hub cache" if offline else "could not be fetched from the hub"
        raise CheckpointError(f"{model} is no directory and {where}", change=advice) from error


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read config and headers and check that all tensors are there, once, with the right shape and dtype.

    Raises UnsupportedModelError for a config that is not understood, CheckpointError for everything else.
    """
    _refuse_odd_files(directory)
    spec = spec_of(read_json(directory / "config.json"))
    found = _tensors(directory)
    layers = tuple(
        tuple(_expect(found, spec.layer_prefix(i) + name, shape) for name, shape in spec.layer_tensors())
        for i in _layers(spec, found)
    )
    non_layer = tuple(_expect(found, name, shape) for name, shape in spec.non_layer_tensors())
    _refuse_extra(spec, found, {record.name for records in (*layers, non_layer) for record in records})
    return Checkpoint(directory, spec, layers, non_layer)


def _refuse_odd_files(directory: Path) -> None:
    """Raises CheckpointError for what would be read for ever, or to the end of memory: pipes, devices, enormous files."""
    try:
        present = [path for path in directory.iterdir() if any(path.match(pattern) for pattern in _WANTED_FILES)]
        for path in sorted(path for path in present if not path.is_dir()):
            if not path.is_file():
                raise CheckpointError(f"{path} is no file", change="download it again")
            if path.suffix != ".safetensors" and path.stat().st_size > _MOST_TEXT:
                raise CheckpointError(
                    f"{path} is too large", need=f"at most {_MOST_TEXT} bytes", have=f"{path.stat().st_size}",
                    change="download it again",
                )  # fmt: skip
    except OSError as error:
        raise CheckpointError(
            f"{directory}: {error.strerror or error}", change="give the directory of a checkpoint"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is missing, damaged or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(
            f"{path}: {error.strerror or error}", change="give the directory of a whole checkpoint"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})", change="download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object", change="download it again")
    return content


def _tensors(directory: Path) -> dict[str, TensorRecord]:
    """All tensors of a checkpoint, by name, from its one file or from all shards of its index."""
    if (directory / _INDEX).exists():
        return _sharded(directory)
    if (directory / _SINGLE).exists():
        return read_header(directory / _SINGLE)
    others = sorted(path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
    raise CheckpointError(
        f"{directory} has no safetensors weights",
        need=f"{_SINGLE} or {_INDEX}",
        have=", ".join(others[:3]) or "no weights at all",
        change="convert it with transformers' save_pretrained"
        if others
        else "give the directory of a whole checkpoint",
    )


def _sharded(directory: Path) -> dict[str, TensorRecord]:
    where = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{_INDEX} has no weight_map", change="download it again")
    for name, shard in where.items():
        plain = isinstance(shard, str) and shard.isprintable() and Path(shard).name == shard
        if not plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{_INDEX}: {shard!r}, given for {name!r}, is no safetensors file name", change="download it again"
            )
    shards = sorted(set(where.values()))
    for shard in shards:
        if not (directory / shard).exists():
            raise CheckpointError(f"shard {shard} is missing", need=f"{len(shards)} shards", change="download it again")
    found: dict[str, TensorRecord] = {}
    for shard in shards:
        for name, record in read_header(directory / shard).items():
            if where.get(name) != shard:
                told = f"says {where[name]}" if name in where else "does not list it"
                raise CheckpointError(
                    f"tensor {name!r} lies in {shard}, but the index {told}", change="download the index again"
                )
            found[name] = record
    missing = sorted(set(where) - set(found))
    if missing:
        raise CheckpointError(
            f"the index says {missing[0]!r} is in {where[missing[0]]}, but it is not", change="download it again"
        )
    return found


def _layers(spec: ModelSpec, found: dict[str, TensorRecord]) -> range:
    """The layer numbers. Raises CheckpointError if the file has more or fewer layers than the config says."""
    numbers = {int(match.group(1)) for match in map(_LAYER.match, found) if match}
    n_found = max(numbers) + 1 if numbers else 0
    if n_found != spec.n_layers:
        raise CheckpointError(
            "weights and config.json disagree",
            need=f"{spec.n_layers} layers as num_hidden_layers says",
            have=f"{n_found}",
            change="use the config.json that belongs to these weights",
        )
    return range(spec.n_layers)


def _expect(found: dict[str, TensorRecord], name: str, shape: tuple[int, ...]) -> TensorRecord:
    record = found.get(name)
    if record is None:
        raise CheckpointError(f"tensor {name!r} is missing from the weights", change="download the checkpoint again")
    if record.shape != shape:
        raise CheckpointError(
            f"{record.path.name}: tensor {name!r} is misshapen",
            need=str(list(shape)),
            have=str(list(record.shape)),
            change="use the config.json that belongs to these weights",
        )
    record.torch_dtype()
    return record


def _refuse_extra(spec: ModelSpec, found: dict[str, TensorRecord], expected: set[str]) -> None:
    # Some tied checkpoints store the head all the same; transformers takes the embedding, and so do we.
    ignored = {f"{HEAD}.weight"} if spec.tied else set()
    for name, record in found.items():
        if name not in expected | ignored and not _DERIVED.fullmatch(name):
            raise CheckpointError(
                f"{record.path.name}: tensor {name!r} belongs to no part of a {spec.family} model",
                change="use the config.json that belongs to these weights",
            )


def end_ids(directory: Path) -> frozenset[int]:
    """Every token id that ends a text, from generation_config.json or, where that names none, config.json."""
    for name in ("generation_config.json", "config.json"):
        if (directory / name).exists():
            ids = read_json(directory / name).get("eos_token_id")
            ids = [ids] if isinstance(ids, int) else ids
            if ids is not None and not (isinstance(ids, list) and all(type(one) is int for one in ids)):
                raise CheckpointError(
                    f"{directory / name}: eos_token_id is {ids!r}", need="a token id, or a list of them"
                )
            if ids:
                return frozenset(ids)
    return frozenset()

"""Finding a checkpoint and checking all of it before the first weight moves."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload_rt.config import LEFT_TO_THE_MODEL, EngineConfig, SamplingParams
from offload_rt.dtypes import DTYPES, DType
from offload_rt.errors import CheckpointError, SettingsError
from offload_rt.models.architecture import Architecture, Part, TensorShape
from offload_rt.models.families import spec_of
from offload_rt.models.heads import head_kind
from offload_rt.weights import gguf
from offload_rt.weights.formats import WeightFormat, format_of
from offload_rt.weights.header import FLOATS, TensorRecord, read_header
from offload_rt.weights.layout import PAGE
from offload_rt.weights.source import OTHER_CONFIG, Source

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADS = "medusa_lm_head.safetensors"
# What comes from the hub before it is known which weights are wanted.
_ABOUT = (
    _INDEX, "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json",
    "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja",
)  # fmt: skip
_DAMAGED = "download it again"
_WHOLE = "give the directory of a whole checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk whose every tensor has been found where it should be.

    path       its directory, or its GGUF file
    layers     per layer the stored tensors, in the order of `spec.layer_tensors(i)`
    non_layer  in the order of `spec.non_layer_tensors()`
    found      all tensors, by the names that the model has for them
    whole      of which this is a part, if it is one
    """

    path: Path
    spec: Architecture
    format: WeightFormat
    layers: tuple[tuple[TensorRecord, ...], ...]
    non_layer: tuple[TensorRecord, ...]
    found: Mapping[str, TensorRecord] = field(default_factory=dict, compare=False, repr=False)
    whole: "Checkpoint | None" = field(default=None, compare=False, repr=False)

    @property
    def records(self) -> Iterable[TensorRecord]:
        """The records of all tensors."""
        return (record for records in (*self.layers, self.non_layer) for record in records)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(record.nbytes for record in self.records)

    @property
    def dtype(self) -> DType:
        """The dtype of the embedding, or where that is quantised the one of the config or of the
        first vector or matrix.
        """
        if self.non_layer[0].dtype not in FLOATS and self.spec.dtype_name is not None:
            return DTYPES[self.spec.dtype_name]
        floats = (
            FLOATS[one.dtype] for one in (*self.non_layer, *self.layers[0]) if one.dtype in FLOATS
        )
        return next(floats, DType.FLOAT32)

    def by_expert(self) -> "tuple[Checkpoint, tuple[tuple[TensorRecord, ...], ...]] | None":
        """The same without the experts of its mixtures, and each expert, layer by layer; None where
        it cannot be divided so.
        """
        mixture = self.spec.mixture
        if mixture is None:
            return None
        layers = list(self.layers)
        found = list[tuple[TensorRecord, ...]]()
        for i in mixture.layers:
            owners = self.spec.expert_names(i)
            rest = list[TensorRecord]()
            of_experts: list[list[TensorRecord]] = [[] for _ in range(mixture.n_experts)]
            for record in self.layers[i]:
                names = accumulate(record.key.split("."), "{}.{}".format)
                name = next((one for one in names if one in owners), None)
                expert = None if name is None else owners[name]
                if name is None:
                    rest.append(record)
                elif expert is not None:
                    of_experts[expert].append(record)
                elif record.key == name and record.shape[0] == mixture.n_experts:
                    for n, own in enumerate(of_experts):
                        one = rows_of(record, Part(record.name, n, 1))
                        own.append(replace(one, shape=one.shape[1:], key=f"{name}.{n}"))
                else:  # stored in another way than row by row
                    return None
            layers[i] = tuple(rest)
            found += map(tuple, of_experts)
        return replace(self, layers=tuple(layers)), tuple(found)

    @cached_property
    def identity(self) -> str:
        """A short hash of what makes the whole weights: the config, and of each tensor its name,
        shape, dtype and one page.

        A page of content tells a fine-tune from its base, which have the same headers; unlike times
        of files it stays the same in a copy, a new download or other shards. It costs one small
        read a tensor.
        Raises CheckpointError where a file cannot be read.
        """
        found = hashlib.sha256(repr(sorted(read_config(self.path).items())).encode())
        for one in (self.whole or self).records:
            middle = (one.start + one.stop) // 2
            try:
                with one.path.open("rb", buffering=0) as file:
                    file.seek(middle)
                    page = file.read(min(PAGE, one.stop - middle))
            except OSError as error:
                raise CheckpointError(f"{one.path}: {error.strerror or error}") from error
            found.update(repr((one.name, one.shape, one.dtype)).encode() + page)
        return found.hexdigest()[:24]


def locate(
    model: str, revision: str | None = None, offline: bool = False, has_weights: bool = True
) -> Path:
    """The local directory of a checkpoint, fetched from the hub where it is not there already, or
    its GGUF file.

    has_weights  else all but the weights is fetched Of the hub's weights only those come that the
                 index names, and none before the config has been understood.
    Raises CheckpointError if there is none, UnsupportedModelError for such a config.
    """
    path = _local(model)
    if path is None:
        about = _fetch_about(model, revision, offline)
        return (
            _snapshot(model, about.name, offline, (*_ABOUT, *_weight_files(about)))
            if has_weights
            else about
        )
    if path.suffix == gguf.SUFFIX and path.is_file():
        return gguf.parts(path)[0]
    if not path.is_dir():
        raise CheckpointError(
            f"{model} is a file", change="give the directory of a checkpoint that it lies in"
        )
    return (
        path if (path / _INDEX).exists() or (path / _SINGLE).exists() else _only_gguf(path) or path
    )


def check_paths(config: EngineConfig) -> None:
    """Raise CheckpointError where a model is a path without a file; hub ids are not looked up.

    Under torchrun, ranks connect first, so that every rank learns of the error.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    for model in filter(None, (config.model, config.draft_model)):
        _local(model)


def is_here(model: str, revision: str | None = None) -> bool:
    """Whether nothing of a model has to be fetched from the hub. Raises as `locate` where its
    config is not understood.
    """
    try:
        return _local(model) is not None or bool(tensors_of(locate(model, revision, offline=True)))
    except CheckpointError:
        return False


def _fetch_about(model: str, revision: str | None, offline: bool) -> Path:
    """The directory of what is known of a model on the hub beside its weights; its config has been
    checked.
    """
    directory = _snapshot(model, revision, offline, _ABOUT)
    config = read_config(directory)
    format_of(config.pop("quantization_config", None))
    if head_kind(config) is None:
        spec_of(config)
    return directory


def _snapshot(model: str, revision: str | None, offline: bool, files: Iterable[str]) -> Path:
    """The directory of some files of the hub, its config.json among them. What is here already is
    not fetched again.
    """
    import huggingface_hub  # not at the top: checkpoints in directories need none

    fetch = partial(
        huggingface_hub.snapshot_download,
        model,
        allow_patterns=list(files),
        local_files_only=offline,
    )
    directory = Path(_from_hub(model, offline, partial(fetch, revision=revision)))
    if not (directory / "config.json").exists():
        change = "take one of safetensors weights, or download a GGUF file of it and give its path"
        raise CheckpointError(f"{model} has no config.json on the hub", change=change)
    return directory


def _weight_files(directory: Path) -> set[str]:
    """The names of the files that hold the weights: those of the index, else the one that there may
    be.
    """
    return (
        set(_weight_map(directory).values()) if (directory / _INDEX).exists() else {_SINGLE, _HEADS}
    )


def _only_gguf(directory: Path) -> Path | None:
    """The one GGUF file of a directory, the first part of it; None where there is none. Raises
    CheckpointError for several.
    """
    found = sorted({gguf.parts(path)[0] for path in directory.glob(f"*{gguf.SUFFIX}")})
    if len(found) > 1:
        have = ", ".join(path.name for path in found[:3])
        raise CheckpointError(
            f"{directory} has {len(found)} GGUF files", have=have, change="give one of them"
        )
    return found[0] if found else None


def find_config(model: str, revision: str | None = None, offline: bool = False) -> dict[str, Any]:
    """The config of a model whose weights need not be there: of a file, a GGUF file, a directory,
    or the hub.

    Raises CheckpointError if there is none.
    """
    path = _local(model)
    if path is not None:
        return (
            read_config(locate(model))
            if path.is_dir() or path.suffix == gguf.SUFFIX
            else read_json(path)
        )
    if model.endswith(".json") or "/" not in model:
        raise CheckpointError(
            f"no model called "
            f"{model}", need="a config.json, its directory, or a hub id like org/name",
            change="give one of these, or the name of a shape that is built in",
        )  # fmt: skip
    return read_config(_snapshot(model, revision, offline, ("config.json",)))


def open_headers(model: str, revision: str | None = None, offline: bool = False) -> Checkpoint:
    """A checkpoint by its headers, which alone are fetched where it is on the hub: no weight of it
    can be read then.

    Raises as `locate` and `open_checkpoint`.
    """
    if offline or is_here(model, revision):
        return open_checkpoint(locate(model, revision, offline))
    config = find_config(model, revision)
    weight_format = format_of(config.pop("quantization_config", None))
    import huggingface_hub

    api = huggingface_hub.HfApi()
    found = _from_hub(
        model, offline, partial(api.get_safetensors_metadata, model, revision=revision)
    )
    stored = {
        name: TensorRecord(
            name,
            one.dtype,
            tuple(one.shape),
            Path(file),
            one.data_offsets[0],
            one.data_offsets[1],
            name,
        )
        for file, about in found.files_metadata.items()
        for name, one in about.tensors.items()
    }
    return assemble(Path(model), spec_of(config), weight_format, stored)


def _local(model: str) -> Path | None:
    """The file or directory of this name; None where there is none and it may be a hub id."""
    advice = "give the directory of a checkpoint, or a hub id like org/name"
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    # a name too long, a folder that may not be entered, the home of nobody
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{model}: {error}", change=advice) from error
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"no model called {model}: no such directory", change=advice)
    return None


def _from_hub(model: str, offline: bool, fetch: Callable[[], Any]) -> Any:
    """What the hub gives. Raises CheckpointError, in one sentence, where it gives nothing."""
    from huggingface_hub.errors import GatedRepoError

    try:
        return fetch()
    except GatedRepoError as error:
        problem = f"{model} is gated on the hub"
        raise CheckpointError(problem, change="accept its terms there and set HF_TOKEN") from error
    except Exception as error:  # its client raises what the HTTP library below it does
        if offline:
            problem = f"{model} is no directory and not in the hub cache as a whole"
            change = "leave out --offline"
            raise CheckpointError(problem, change=change) from error
        raise CheckpointError(
            f"{model} is no directory and could not be fetched from the hub",
            have=str(error).strip().split("\n")[0][:200],
            change=(
                "check the name, or give the directory of a checkpoint; a private one needs"
                " HF_TOKEN"
            ),
        ) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config and headers and check that all tensors are there, once, with the right shape and
    dtype.

    path  of a directory or a GGUF file, as `locate` gives it

    Raises UnsupportedModelError for a config that is not understood, CheckpointError for everything
    else.
    """
    config, found = _read(path)
    weight_format = format_of(config.pop("quantization_config", None))
    return assemble(
        path, spec_of(config), weight_format, tensors_of(path) if found is None else found
    )


def assemble(
    path: Path, spec: Architecture, weight_format: WeightFormat, stored: dict[str, TensorRecord]
) -> Checkpoint:
    """The checkpoint of a model whose tensors are among those stored.

    Raises CheckpointError where one is missing or not what the model says, or one is left over.
    """
    spec, parts = spec.of_checkpoint({name: record.shape for name, record in stored.items()})
    found = {name: rows_of(stored[part.name], part) for name, part in parts.items()}

    def records(tensors: Iterable[TensorShape], prefix: str = "") -> tuple[TensorRecord, ...]:
        source = Source(found, prefix)
        stored = [
            one
            for name, shape in tensors
            for one in weight_format.stored(name, shape, None, source)
        ]
        return tuple(source.expect(one) for one in stored)

    layers = tuple(
        records(spec.layer_tensors(i), spec.layer_prefix(i)) for i in range(spec.n_layers)
    )
    checkpoint = Checkpoint(
        path, spec, weight_format, layers, records(spec.non_layer_tensors()), found
    )
    expected = {(record.name, record.start) for record in checkpoint.records}
    for name, record in found.items():
        is_expected = (record.name, record.start) in expected or spec.is_unused(name)
        if not is_expected and not weight_format.is_unused(name, Source(found)):
            raise CheckpointError(
                f"{record.path.name}: tensor {name!r} belongs to no part of a {spec.family} model",
                change=OTHER_CONFIG,
            )
    return checkpoint


def rows_of(record: TensorRecord, part: Part) -> TensorRecord:
    """The record of some rows of a tensor."""
    if not part.n_rows:
        return record
    nbytes = (record.stop - record.start) // record.shape[0]
    start = record.start + part.first * nbytes
    return replace(
        record,
        shape=(part.n_rows, *record.shape[1:]),
        start=start,
        stop=start + part.n_rows * nbytes,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError if it is missing, damaged or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}", change=_WHOLE) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON ({error})", change=_DAMAGED) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object", change=_DAMAGED)
    return content


def read_config(path: Path) -> dict[str, Any]:
    """The config of a checkpoint: of its directory or its GGUF file. Raises what reading these
    does.
    """
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, TensorRecord] | None]:
    """The config, and the tensors where one file has both."""
    return (
        gguf.read_gguf(path)
        if path.suffix == gguf.SUFFIX
        else (read_json(path / "config.json"), None)
    )


def tensors_of(directory: Path) -> dict[str, TensorRecord]:
    """All tensors of a checkpoint, by name, from its one file or from all shards of its index.

    Raises CheckpointError where there are none, or a file is damaged.
    """
    if (directory / _INDEX).exists():
        return _sharded(directory)
    for name in (_SINGLE, _HEADS):
        if (directory / name).exists():
            return read_header(directory / name)
    others = sorted(
        path.name for path in directory.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    raise CheckpointError(
        f"{directory} has no safetensors weights", need=f"{_SINGLE} or {_INDEX}",
        have=", ".join(others[:3]) or "no weights at all",
        change="give the directory of a whole checkpoint, or convert this one with transformers' "
               "save_pretrained",
    )  # fmt: skip


def _weight_map(directory: Path) -> dict[str, str]:
    """The file of each tensor, by the index. Raises CheckpointError for an index that is
    damaged.
    """
    where = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{_INDEX} has no weight_map", change=_DAMAGED)
    for name, shard in where.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(
                f"{_INDEX}: {shard!r}, given for {name!r}, is no file name", change=_DAMAGED
            )
    return where


def _sharded(directory: Path) -> dict[str, TensorRecord]:
    where = _weight_map(directory)
    found = dict[str, TensorRecord]()
    for shard in sorted(set(where.values())):
        if not (directory / shard).exists():
            raise CheckpointError(f"shard {shard} is missing", change=_DAMAGED)
        found |= {
            name: record
            for name, record in read_header(directory / shard).items()
            if where.get(name) == shard
        }
    missing = sorted(set(where) - set(found))
    if missing:
        problem = f"the index says {missing[0]!r} is in {where[missing[0]]}, but it is not"
        raise CheckpointError(problem, change=_DAMAGED)
    return found


def end_ids(path: Path) -> frozenset[int]:
    """Every token id that ends a text, from generation_config.json or, where that names none,
    config.json or a GGUF file.
    """
    files = (
        [path / name for name in ("generation_config.json", "config.json")]
        if path.is_dir()
        else [path]
    )
    for file in files:
        if file.exists():
            ids = (read_json(file) if path.is_dir() else read_config(file)).get("eos_token_id")
            if ids is not None and ids != []:
                return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def sampling_defaults(path: Path) -> SamplingParams:
    """How generation_config.json has tokens chosen; None for what it leaves open. Raises
    CheckpointError if that cannot be.

    As in transformers, the most probable token is taken unless it says `do_sample`.
    """
    file = path / "generation_config.json"
    raw = read_json(file) if file.exists() else {}
    given = {name: raw[name] for name in LEFT_TO_THE_MODEL if raw.get(name) is not None}
    if raw.get("do_sample"):
        given.setdefault("temperature", 1.0)
    else:
        given.pop("temperature", None)
    try:
        return SamplingParams(**given)
    except SettingsError as error:
        raise CheckpointError(
            f"{file}: {error.problem}", need=error.need, change="mend it"
        ) from error

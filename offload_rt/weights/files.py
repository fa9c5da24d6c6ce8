"""Files of a checkpoint directory: configs, the index, and headers of shards."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload_rt.config import format_size
from offload_rt.errors import CapacityError, CheckpointError, SettingsError
from offload_rt.sampling_params import LEFT_TO_THE_MODEL, SamplingParams
from offload_rt.weights import gguf
from offload_rt.weights.header import TensorRecord, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
HEADS = "medusa_lm_head.safetensors"
_GENERATION = "generation_config.json"
# A checkpoint with images has one of these.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}
_DAMAGED = "download it again"
_WHOLE = "give the directory of a whole checkpoint"
_CONVERT = ", or convert it: torch.load(FILE, weights_only=True), then safetensors.torch.save_file"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises CheckpointError if the file is missing or damaged."""
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
    """Read the config of a directory or GGUF file; raises as `read_json` or `read_gguf`."""
    is_gguf = path.suffix == gguf.SUFFIX
    return gguf.read_gguf(path)[0] if is_gguf else read_json(path / "config.json")


def companions(directory: Path) -> list[Path]:
    """Return the files of a checkpoint besides its weights."""
    files = [path for path in directory.iterdir() if path.is_file() and path.name != INDEX]
    return [path for path in files if path.suffix not in _WEIGHTS]


def check_room(folder: Path, nbytes: int) -> None:
    """Raise CapacityError if the disk of an existing folder has less than `nbytes` free."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        problem = f"the disk of {folder} is too full"
        need, have = format_size(nbytes), f"{format_size(free)} free"
        change = "free space, or name a folder on another disk"
        raise CapacityError(problem, need=need, have=have, change=change)


def tensors_of(directory: Path) -> dict[str, TensorRecord]:
    """Return the tensors of all shards by name; raises CheckpointError if none or damaged."""
    if (directory / INDEX).exists():
        shards = shard_names(directory)
        tensors = dict[str, TensorRecord]()
        for shard in sorted(set(shards.values())):
            if not (directory / shard).exists():
                raise CheckpointError(f"shard {shard} is missing", change=_DAMAGED)
            stored = read_header(directory / shard)
            tensors |= {name: stored[name] for name in stored if shards.get(name) == shard}
        if missing := sorted(shards.keys() - tensors.keys()):
            problem = f"the index says {missing[0]!r} is in {shards[missing[0]]}, but it is not"
            raise CheckpointError(problem, change=_DAMAGED)
        return tensors
    for name in (SINGLE, HEADS):
        if (directory / name).exists():
            return read_header(directory / name)
    names = sorted(path.name for path in directory.iterdir())
    unsupported = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))]
    problem = f"{directory} has no safetensors weights"
    have = ", ".join(unsupported[:3]) or "no weights at all"
    change = _WHOLE + (_CONVERT if unsupported else "")
    raise CheckpointError(problem, need=f"{SINGLE} or {INDEX}", have=have, change=change)


def shard_names(directory: Path) -> dict[str, str]:
    """Return the shard of each tensor by the index; raises CheckpointError if damaged."""
    shards = read_json(directory / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise CheckpointError(f"{INDEX} has no weight_map", change=_DAMAGED)
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            problem = f"{INDEX}: {shard!r}, given for {name!r}, is no file name"
            raise CheckpointError(problem, change=_DAMAGED)
    return shards


def end_ids(path: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end a text; generation_config.json takes precedence over the config."""
    for source in (_generation_config(path), config):
        ids = source.get("eos_token_id")
        if ids is not None and ids != []:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def sampling_defaults(path: Path) -> SamplingParams:
    """Return the settings of generation_config.json; greedy without `do_sample`.

    As in transformers; None for absent settings. Raises CheckpointError for invalid settings.
    """
    raw = _generation_config(path)
    given = {name: raw[name] for name in LEFT_TO_THE_MODEL if raw.get(name) is not None}
    if raw.get("do_sample"):
        given.setdefault("temperature", 1.0)
    else:
        given.pop("temperature", None)
    try:
        return SamplingParams(**given)
    except SettingsError as error:
        problem = f"{path / _GENERATION}: {error.problem}"
        raise CheckpointError(problem, need=error.need, change="mend it") from error


def _generation_config(path: Path) -> dict[str, Any]:
    return read_json(path / _GENERATION) if (path / _GENERATION).exists() else {}

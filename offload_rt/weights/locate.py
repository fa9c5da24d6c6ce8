"""Local paths of checkpoints, fetched from the Hugging Face hub if necessary."""

import os
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from offload_rt.config import EngineConfig
from offload_rt.errors import CheckpointError
from offload_rt.models.families import parse_architecture
from offload_rt.models.head_configs import head_kind
from offload_rt.weights import gguf
from offload_rt.weights.files import (
    HEADS,
    INDEX,
    SINGLE,
    read_config,
    read_json,
    shard_names,
    tensors_of,
)
from offload_rt.weights.formats import format_of
from offload_rt.weights.header import TensorRecord

# Files fetched from the hub before the weight files are known.
_ABOUT = (
    INDEX, "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "additional_chat_templates/*.jinja", "*processor_config.json",
)  # fmt: skip


def locate(
    model: str, revision: str | None = None, offline: bool = False, has_weights: bool = True
) -> Path:
    """Return the directory or GGUF file of a checkpoint, after fetching it from the hub if needed.

    has_weights  False to skip the weights
    Only weights in the index are fetched, after a check of the config.
    Raises CheckpointError without a checkpoint, UnsupportedModelError for an unsupported config.
    """
    path = local_path(model)
    if path is None:
        about = _snapshot(model, revision, offline, _ABOUT)
        config = read_config(about)
        format_of(config.pop("quantization_config", None))
        if head_kind(config) is None:
            parse_architecture(config)
        if not has_weights:
            return about
        has_index = (about / INDEX).exists()
        weights = shard_names(about).values() if has_index else (SINGLE, HEADS)
        return _snapshot(model, about.name, offline, {*_ABOUT, *weights})
    if path.suffix == gguf.SUFFIX and path.is_file():
        return gguf.parts(path)[0]
    if not path.is_dir():
        change = "give the directory of a checkpoint, or a GGUF file"
        raise CheckpointError(f"{model} is a file", change=change)
    if (path / INDEX).exists() or (path / SINGLE).exists():
        return path
    files = sorted({gguf.parts(file)[0] for file in path.glob(f"*{gguf.SUFFIX}")})
    if len(files) > 1:
        problem = f"{path} has {len(files)} GGUF files"
        have = ", ".join(file.name for file in files[:3])
        raise CheckpointError(problem, have=have, change="give one of them")
    return files[0] if files else path


def check_paths(config: EngineConfig) -> None:
    """Raise CheckpointError for missing paths, on every rank after all connect; ignores hub ids."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    for model in filter(None, (config.model, config.draft_model)):
        local_path(model)


def is_here(model: str, revision: str | None = None) -> bool:
    """Return whether a model is complete without the hub; raises for an unsupported config."""
    try:
        if local_path(model) is None:
            tensors_of(locate(model, revision, offline=True))
    except CheckpointError:
        return False
    return True


def find_config(model: str, revision: str | None = None, offline: bool = False) -> dict[str, Any]:
    """Return the config of a file, directory or hub id; raises CheckpointError without one."""
    path = local_path(model)
    if path is not None:
        is_checkpoint = path.is_dir() or path.suffix == gguf.SUFFIX
        return read_config(locate(model)) if is_checkpoint else read_json(path)
    if model.endswith(".json") or "/" not in model:
        need = "a config.json, its directory, or a hub id like org/name"
        change = "give one of these, or the name of a shape that is built in"
        raise CheckpointError(f"no model called {model}", need=need, change=change)
    return read_config(_snapshot(model, revision, offline, ("config.json",)))


def hub_headers(model: str, revision: str | None, offline: bool) -> dict[str, TensorRecord]:
    """Return the tensors of a hub checkpoint by name, from headers only; raises CheckpointError."""
    import huggingface_hub

    fetch = huggingface_hub.HfApi().get_safetensors_metadata
    metadata = _from_hub(model, offline, partial(fetch, model, revision=revision))
    return {
        name: TensorRecord(name, tensor.dtype, tuple(tensor.shape), Path(file), start, stop, name)
        for file, header in metadata.files_metadata.items()
        for name, tensor in header.tensors.items()
        for start, stop in [tensor.data_offsets]
    }


def local_path(model: str) -> Path | None:
    """Return an existing path, or None for a hub id; raises CheckpointError for missing paths."""
    advice = "give the directory of a checkpoint, or a hub id like org/name"
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    # a name too long, a folder without permission, an unknown home
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{model}: {error}", change=advice) from error
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise CheckpointError(f"no model called {model}: no such directory", change=advice)
    return None


def _snapshot(model: str, revision: str | None, offline: bool, files: Iterable[str]) -> Path:
    """Fetch missing files from the hub; return their directory, which has a config.json."""
    from huggingface_hub import snapshot_download  # not at the top: directories need none

    fetch = partial(snapshot_download, model, revision=revision, local_files_only=offline)
    directory = Path(_from_hub(model, offline, partial(fetch, allow_patterns=list(files))))
    if not (directory / "config.json").exists():
        change = "take one of safetensors weights, or download a GGUF file of it and give its path"
        raise CheckpointError(f"{model} has no config.json on the hub", change=change)
    return directory


def _suggestion(model: str) -> str:
    folder = Path(model).parent
    names = [entry.name for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
    close = get_close_matches(Path(model).name, names, n=1)
    return f"did you mean {folder / close[0]}?" if close else ""


def _from_hub(model: str, offline: bool, fetch: Callable[[], Any]) -> Any:
    """Return the result of a hub request; raises CheckpointError with a single sentence."""
    from huggingface_hub import errors

    try:
        return fetch()
    except errors.GatedRepoError as error:
        problem = f"{model} is gated on the hub"
        raise CheckpointError(problem, change="accept its terms there and set HF_TOKEN") from error
    except Exception as error:  # the client also raises errors of its HTTP library
        suggestion = _suggestion(model)
        if offline:
            problem = f"{model} is no directory and not in the hub cache as a whole"
            raise CheckpointError(problem, change=suggestion or "leave out --offline") from error
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        change = suggestion or "check the name, or give the directory of a checkpoint"
        if isinstance(error, errors.LocalEntryNotFoundError):
            reason = "no connection"
            change = suggestion or f"{change}, or check the network"
        elif isinstance(error, errors.RepositoryNotFoundError):
            reason = "no such model"
            change += "; a private one needs HF_TOKEN"
        problem = f"{model} is no directory and could not be fetched from the hub ({reason})"
        raise CheckpointError(problem, change=change) from error

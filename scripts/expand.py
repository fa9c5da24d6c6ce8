"""Write a checkpoint of a larger Llama shape with the same function as a small checkpoint.

The large weights contain the small weights. Values without effect on the output are random and of
ordinary size. Therefore bytes, work and compressibility equal a real model's of this shape.
Weights are only copied and scaled by powers of two under two conditions: the large width is a
multiple of the small width, and head dimensions grow by a factor of 1, 4 or 16.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from expansion import (
    LLAMAS,
    Expansion,
    Piece,
    Residual,
    Shape,
    check,
    residual_of,
    shape_for,
    shape_of,
    shards,
    wider_mlp,
)
from safetensors import SafetensorError
from safetensors.torch import save_file

from offload_rt.config import parse_size
from offload_rt.errors import CheckpointError, OffloadError, SettingsError
from offload_rt.models.families import parse_architecture
from offload_rt.models.native import NativeDecoder
from offload_rt.weights.checkpoint import Checkpoint, open_checkpoint
from offload_rt.weights.files import check_room, read_json
from offload_rt.weights.locate import locate

VERSION = 1
RECIPE = "expansion.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt",
    "*.jinja",
)  # fmt: skip


def target_config(
    source: Checkpoint, shape: Shape, dtype: str, max_positions: int | None
) -> dict[str, Any]:
    """Return the target's config.json."""
    raw = read_json(source.path / "config.json")
    raw.pop("torch_dtype", None)
    raw |= asdict(shape) | {"tie_word_embeddings": False, "dtype": dtype}
    raw["max_position_embeddings"] = (
        source.spec.max_positions if max_positions is None else max_positions
    )
    residual = residual_of(source.spec, parse_architecture(raw))
    return raw | {"rms_norm_eps": source.spec.eps * residual.mean_square}


def fingerprint(source: Checkpoint) -> str:
    """Return the SHA-256 of the source: config, weights and companions."""
    digest = hashlib.sha256()
    weights = {record.path for records in (*source.layers, source.non_layer) for record in records}
    for path in sorted({source.path / "config.json", *weights, *companions(source.path)}):
        with path.open("rb") as file:
            digest.update(
                f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return digest.hexdigest()


def companions(directory: Path) -> list[Path]:
    """Return files of the vocabulary and of generation settings, to copy."""
    return sorted(
        {path for pattern in COMPANIONS for path in directory.glob(pattern) if path.is_file()}
    )


def is_complete(out: Path, recipe: dict[str, Any], source: Path) -> bool:
    """Return whether `out` contains this expansion; an outdated expansion is replaced.

    Raises SettingsError if `out` has other contents.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        old = read_json(out / RECIPE)
    except CheckpointError:
        old = {}
    replaceable = {key: recipe[key] for key in ("version", "source")}
    if out == source.resolve() or old | replaceable != recipe:
        raise SettingsError(
            f"{out} already has other contents", change="delete it or give another --out"
        )
    try:
        open_checkpoint(out)
    except OffloadError:
        return False
    return old == recipe and all((out / path.name).exists() for path in companions(source))


def write(
    expansion: Expansion,
    source: Checkpoint,
    config: dict[str, Any],
    recipe: dict[str, Any],
    out: Path,
) -> None:
    """Write all files to a temporary directory and rename it to `out`."""
    target = parse_architecture(config)
    itemsize = DTYPES[recipe["dtype"]].itemsize
    files = shards(target, itemsize, recipe["shard_nbytes"])
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(out.parent, 2**20 + sum(piece.nbytes(itemsize) for file in files for piece in file))
    partial, old = (out.parent / f".{out.name}.{os.getpid()}.{end}" for end in ("partial", "old"))
    try:
        partial.mkdir()
        _write_weights(expansion, files, itemsize, partial)
        for path in companions(source.path):
            shutil.copyfile(path, partial / path.name)
        _write_json(partial / "config.json", config)
        _write_json(partial / RECIPE, recipe)
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _write_weights(
    expansion: Expansion, files: list[list[Piece]], itemsize: int, directory: Path
) -> None:
    shard_of = {}
    begun = time.monotonic()
    for i, file in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {piece.name: expansion.tensor(piece) for piece in file}
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OffloadError(
                f"{name} could not be written ({error})", change="give another --out"
            ) from error
        del tensors  # before the next shard is made
        _sync(directory / name)
        shard_of |= dict.fromkeys((piece.name for piece in file), name)
        elapsed_s = time.monotonic() - begun
        print(
            f"expand: {i + 1} of {len(files)} shards written, {elapsed_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
    total = sum(math.prod(piece.shape) * itemsize for file in files for piece in file)
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": shard_of},
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def chosen_shape(args: argparse.Namespace, source: NativeDecoder, itemsize: int) -> Shape:
    """Return the shape of the flags; single sizes override --like or the source."""
    given = {
        item.name: getattr(args, item.name)
        for item in fields(Shape)
        if getattr(args, item.name) is not None
    }
    if args.size is not None:
        if given:
            raise SettingsError(
                "--size chooses the shape by itself", change="give either --size or single sizes"
            )
        select = wider_mlp if args.keep_width else shape_for
        return select(parse_size(args.size), source, itemsize)
    return replace(LLAMAS[args.like] if args.like else shape_of(source), **given)


def expand(args: argparse.Namespace) -> None:
    """Write the checkpoint of the flags. Raises OffloadError and deletes partial files."""
    source = open_checkpoint(locate(args.source, offline=True))
    dtype = args.dtype or source.non_layer.tensors[0].stored_dtype().value
    if dtype not in DTYPES:
        raise SettingsError(
            f"the source's dtype {dtype} is not written",
            have=", ".join(DTYPES),
            change="give --dtype",
        )
    shape = chosen_shape(args, source.spec, DTYPES[dtype].itemsize)
    config = target_config(source, shape, dtype, args.max_position_embeddings)
    target = parse_architecture(config)
    out = Path(args.out).expanduser().resolve()
    check(source.spec, target)
    recipe = {
        "version": VERSION, "source": fingerprint(source), **asdict(shape), "dtype": dtype,
        "seed": args.seed,
        "max_position_embeddings": target.max_positions,
        "shard_nbytes": parse_size(args.shard_size),
    }  # fmt: skip
    if is_complete(out, recipe, source.path):
        print(f"expand: {out} is already there", file=sys.stderr)
        return
    residual = residual_of(source.spec, target)
    _report(shape, source.spec, residual)
    write(
        Expansion(source, target, residual, DTYPES[dtype], args.seed), source, config, recipe, out
    )


def _report(shape: Shape, source: NativeDecoder, residual: Residual) -> None:
    factors = (math.sqrt(residual.mean_square), math.sqrt(shape.head_dim / source.head_dim))
    is_exact = all(math.frexp(factor)[0] == 0.5 for factor in factors)
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(shape).items())
    how = "weights scaled by powers of two only" if is_exact else "norms or queries rounded"
    print(f"expand: {sizes}; {how}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    flags = argparse.ArgumentParser(description="Write a larger checkpoint of the same function.")
    flags.add_argument(
        "--source", default="models/demo-target", help="directory of a Llama checkpoint"
    )
    flags.add_argument("--out", required=True, help="directory to write")
    shape = flags.add_mutually_exclusive_group()
    shape.add_argument("--like", choices=LLAMAS, help="use the shape of this model")
    shape.add_argument("--size", help='select a shape of about this size, like "1.5GB"')
    flags.add_argument(
        "--keep-width",
        action="store_true",
        help="with --size, widen the MLP only, so that draft heads of the source fit",
    )
    sizes = (
        "--hidden-size",
        "--layers",
        "--heads",
        "--kv-heads",
        "--head-dim",
        "--intermediate-size",
    )
    for flag, item in zip(sizes, fields(Shape), strict=True):
        flags.add_argument(
            flag, dest=item.name, type=int, metavar="N", help="default: of --like, or of the source"
        )
    flags.add_argument(
        "--max-position-embeddings", type=int, metavar="N", help="default: of the source"
    )
    flags.add_argument(
        "--shard-size",
        default="1GiB",
        help="maximum bytes of a file, which determine the memory use",
    )
    flags.add_argument("--seed", type=int, default=0, help="seed of the values without effect")
    flags.add_argument(
        "--dtype", choices=DTYPES, help="dtype of the written weights; default: of the source"
    )
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Exit codes: 2 for user errors, 3 for system errors, 130 for an interrupt.
    """
    try:
        expand(parser().parse_args(argv))
    except OffloadError as error:
        print(f"expand: {error.for_command_line}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"expand: {error.filename}: {error.strerror}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("expand: interrupted; nothing was left behind", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write a checkpoint of a larger Llama shape that computes the same function as a small one.

The small model's weights stand in the large ones; what cannot change the output is filled with random values of
ordinary size, so that bytes, work and compressibility are those of a real model of that shape. Where the large width
is a multiple of the small one and the large head 1, 4 or 16 small ones, weights are only copied and scaled by powers of
two.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from offload_rt.config import format_size, parse_size
from offload_rt.errors import CapacityError, CheckpointError, OffloadError, SettingsError, UnsupportedModelError
from offload_rt.models._spec import ModelSpec, spec_of
from offload_rt.weights._checkpoint import Checkpoint, locate, open_checkpoint, read_json
from offload_rt.weights._header import TensorRecord

VERSION, RECIPE = 1, "expansion.json"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
COMPANIONS = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "*.jinja",
)  # fmt: skip
CHUNK, POOL = 2**20, 2**25
# Upper bound of what one tensor adds to the header of a safetensors file.
HEADER_ENTRY = 512


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama that may grow, under the names that config.json gives them."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int


LLAMAS = {
    "tinyllama": Shape(2048, 22, 32, 4, 64, 5632),
    "llama-2-7b": Shape(4096, 32, 32, 32, 128, 11008),
    "llama-2-13b": Shape(5120, 40, 40, 40, 128, 13824),
    "llama-33b": Shape(6656, 60, 52, 52, 128, 17920),
    "llama-2-70b": Shape(8192, 80, 64, 8, 128, 28672),
}


@dataclass(frozen=True)
class Residual:
    """How the wide residual holds the narrow: `width` values for each of `scales`, the first of them 1; then zeros."""

    width: int
    scales: tuple[float, ...]
    wide: int

    @property
    def live(self) -> int:
        """Dimensions that may be other than zero."""
        return self.width * len(self.scales)

    @property
    def mean_square(self) -> float:
        """The wide residual's mean square over the narrow one's."""
        return sum(scale**2 for scale in self.scales) * self.width / self.wide

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """Repeat the narrow residual's values along `dim`, scaled, as the wide one holds them."""
        return torch.cat([values * scale for scale in self.scales], dim)


@dataclass(frozen=True)
class Placement:
    """Where the rows of a weight that reads the residual, or the columns of one that writes it, come to stand.

    rows    (n,) int64, in the target; origin  (n,) int64, in the source; scale  what they are multiplied by
    silent  (s,) int64, in the target: what must read or write nothing, `rows` included
    """

    rows: Tensor
    origin: Tensor
    silent: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Piece:
    """One tensor to write: of decoder layer `layer`, or of none, called `kind` there."""

    layer: int | None
    kind: str
    name: str
    shape: tuple[int, ...]

    def nbytes(self, itemsize: int) -> int:
        """Bytes in a file, header included."""
        return math.prod(self.shape) * itemsize + HEADER_ENTRY


class Noise:
    """Random values of ordinary size, the same for the same seed and tensor name."""

    def __init__(self, seed: int, n_values: int) -> None:
        self._seed = seed
        self._pool = torch.randn(min(max(n_values, 2 * CHUNK), POOL), generator=torch.Generator().manual_seed(seed))

    def fill(self, name: str, shape: tuple[int, ...], sigma: float, dtype: torch.dtype) -> Tensor:
        """A normal tensor of mean zero and deviation `sigma`."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        out = torch.empty(shape, dtype=dtype)
        chunks = out.view(-1).split(CHUNK)
        starts = torch.randint(len(self._pool) - CHUNK, (len(chunks), 2), generator=generator).tolist()
        # Drawing each value anew takes several times as long; the sum of two stretches of one pool is as normal, and a
        # compressor finds no stretch of it twice, since the same two would have to meet at the same distance again.
        for chunk, (first, second) in zip(chunks, starts, strict=True):
            total = self._pool[first : first + len(chunk)] + self._pool[second : second + len(chunk)]
            torch.mul(total, sigma * math.sqrt(0.5), out=chunk)
        return out


class Expansion:
    """The target's tensors, made one at a time from the source's."""

    def __init__(
        self, source: Checkpoint, target: ModelSpec, residual: Residual, dtype: torch.dtype, seed: int
    ) -> None:
        n_layers = source.spec.n_layers
        self._source, self._residual, self._dtype = source, residual, dtype
        self._origin = {i * target.n_layers // n_layers: i for i in range(n_layers)}
        self._placements = placements(source.spec, target)
        self._noise = Noise(seed, sum(math.prod(piece.shape) for group in pieces(target) for piece in group))

    def tensor(self, piece: Piece) -> Tensor:
        """The tensor of the given shape, in the target's dtype."""
        if piece.layer is None:
            return self._outer(piece)
        names = [name for name, _ in self._source.spec.layer_tensors()]
        nearest = max(i for i in self._origin if i <= piece.layer)
        weight = _read(self._source.layers[self._origin[nearest]][names.index(piece.kind)])
        is_real = nearest == piece.layer
        if len(piece.shape) == 1:
            return self._norm(piece, weight if is_real else None)
        out, part = self._random(piece, weight), piece.kind.split(".")[1]
        place = self._placements[part] if is_real else _idle(self._placements[part], part)
        (self._place_writer if part in ("o_proj", "down_proj") else self._place_reader)(out, weight, place)
        return out

    def _outer(self, piece: Piece) -> Tensor:
        """Embedding, last norm or head; a tied source's head is its embedding."""
        embed, norm, *head = self._source.outer
        if len(piece.shape) == 1:
            return self._norm(piece, _read(norm))
        if piece.name == embed.name:
            out = torch.zeros(piece.shape, dtype=self._dtype)
            out[:, : self._residual.live] = self._residual.spread(_read(embed), dim=1).to(self._dtype)
            return out
        weight = _read(head[0] if head else embed)
        out = self._random(piece, weight)
        every = torch.arange(piece.shape[0])
        self._place_reader(out, weight, Placement(every, every, every))
        return out

    def _random(self, piece: Piece, like: Tensor) -> Tensor:
        return self._noise.fill(piece.name, piece.shape, float(like.std()) or 0.02, self._dtype)

    def _norm(self, piece: Piece, weight: Tensor | None) -> Tensor:
        out = self._noise.fill(piece.name, piece.shape, 0.02, torch.float32) + 1
        if weight is not None:
            out[: len(weight)] = weight * math.sqrt(self._residual.mean_square)
        return out.to(self._dtype)

    def _place_reader(self, out: Tensor, weight: Tensor, place: Placement) -> None:
        """Put source rows into `out` (rows, wide residual); what they would read of copies is zeroed."""
        out[place.silent, : self._residual.live] = 0
        out[place.rows, : self._residual.width] = (weight[place.origin] * place.scale).to(out.dtype)

    def _place_writer(self, out: Tensor, weight: Tensor, place: Placement) -> None:
        """Put source columns into `out` (wide residual, columns), once for each copy."""
        out[:, place.silent] = 0
        out[: self._residual.live, place.rows] = self._residual.spread(weight[:, place.origin], dim=0).to(out.dtype)


def _idle(place: Placement, part: str) -> Placement:
    """The same part of an added layer: values and up projection read nothing, hence the layer adds exactly zero."""
    none = place.rows[:0]
    return Placement(none, none, place.silent if part in ("v_proj", "up_proj") else none)


def _read(record: TensorRecord) -> Tensor:
    with safe_open(record.path, "pt") as file:
        return file.get_tensor(record.name).float()


def residual_of(source: ModelSpec, target: ModelSpec) -> Residual:
    """Copies that make the ratio of mean squares a power of a quarter, so that the norms are scaled by a power of two.

    A width ratio n 4^k with 1 <= n < 4 needs squared scales that sum to n: the base-4 digits of the ratio count them.
    """
    ratio, rest = divmod(target.hidden_size, source.hidden_size)
    if rest or not ratio:
        return Residual(source.hidden_size, (1.0,), target.hidden_size)
    k = (ratio.bit_length() - 1) // 2
    scales, left = [1.0], ratio - 4**k
    for place in range(k, -1, -1):
        digit, left = divmod(left, 4**place)
        scales += [2.0 ** (place - k)] * digit
    return Residual(source.hidden_size, tuple(scales), target.hidden_size)


def kv_copies(source: ModelSpec, n_heads: int, n_kv_heads: int) -> int:
    """In how many of the target's key-value heads one of the source's must stand, for its queries to find a place."""
    return math.ceil(source.n_heads // source.n_kv_heads / (n_heads // n_kv_heads))


def rotary_dims(source: ModelSpec, target: ModelSpec) -> Tensor:
    """(narrow head_dim,) int64: the wide head's dimensions that turn at the same frequencies as the narrow head's."""
    pairs = torch.arange(source.head_dim // 2) * (target.head_dim // source.head_dim)
    return torch.cat((pairs, pairs + target.head_dim // 2))


def placements(source: ModelSpec, target: ModelSpec) -> dict[str, Placement]:
    """Where the weights of a source layer stand in a target layer."""
    group, wide_group = (spec.n_heads // spec.n_kv_heads for spec in (source, target))
    copies = kv_copies(source, target.n_heads, target.n_kv_heads)
    heads = torch.arange(source.n_heads)
    slots = (heads // group * copies + heads % group // wide_group) * wide_group + heads % group % wide_group
    kv_slots = torch.arange(source.n_kv_heads * copies)
    # A free query slot of a used key-value head attends to real values: nothing may be written from it.
    readable = torch.arange(len(kv_slots) * wide_group)
    plain, rotary, every = torch.arange(source.head_dim), rotary_dims(source, target), torch.arange(target.head_dim)

    def dims(heads: Tensor, within: Tensor, head_dim: int = target.head_dim) -> Tensor:
        return (heads[:, None] * head_dim + within).flatten()

    q_origin, kv_origin = dims(heads, plain, source.head_dim), dims(kv_slots // copies, plain, source.head_dim)
    q_rows, k_rows, mlp = dims(slots, rotary), dims(kv_slots, rotary), torch.arange(source.intermediate_size)
    all_kv, all_mlp = torch.arange(target.n_kv_heads * target.head_dim), torch.arange(target.intermediate_size)
    return {
        "q_proj": Placement(q_rows, q_origin, dims(slots, every), math.sqrt(target.head_dim / source.head_dim)),
        "k_proj": Placement(k_rows, kv_origin, k_rows),
        "v_proj": Placement(dims(kv_slots, plain), kv_origin, all_kv),
        "o_proj": Placement(dims(slots, plain), q_origin, dims(readable, plain)),
        "gate_proj": Placement(mlp, mlp, mlp),
        "up_proj": Placement(mlp, mlp, all_mlp),
        "down_proj": Placement(mlp, mlp, mlp),
    }


def pieces(target: ModelSpec) -> list[list[Piece]]:
    """The target's tensors in the order of their use; those of one list stay in one file where they fit."""
    embed, *last = (Piece(None, name, name, shape) for name, shape in target.outer_tensors())
    layers = (
        [Piece(i, kind, target.layer_prefix(i) + kind, shape) for kind, shape in target.layer_tensors()]
        for i in range(target.n_layers)
    )
    return [[embed], *layers, last]


def shards(target: ModelSpec, itemsize: int, limit: int) -> list[list[Piece]]:
    """The tensors of each file. Raises CapacityError for a tensor larger than a file may be."""
    files: list[list[Piece]] = [[]]
    room = limit
    for group in pieces(target):
        if sum(piece.nbytes(itemsize) for piece in group) > room:
            files, room = [*files, []], limit
        for piece in group:
            nbytes = piece.nbytes(itemsize)
            if nbytes > limit:
                raise CapacityError(
                    f"{piece.name} does not fit a shard", need=format_size(nbytes), have=format_size(limit),
                    change="raise --shard-size",
                )  # fmt: skip
            if nbytes > room:
                files, room = [*files, []], limit
            files[-1].append(piece)
            room -= nbytes
    return [file for file in files if file]


def shape_for(nbytes: int, source: ModelSpec, itemsize: int) -> Shape:
    """The widest Llama of about `nbytes` that is as deep as real ones. Raises CapacityError if none is that small."""
    widths = sorted({source.hidden_size * factor * 2**j for factor in (1, 3) for j in range(8)}, reverse=True)
    for width in widths:
        shape = _shape_of_width(width, nbytes // itemsize - 2 * source.vocab_size * width, source)
        if shape is not None:
            return shape
    problem = f"no model of {format_size(nbytes)} holds the source"
    raise CapacityError(problem, change="raise --size, or give the sizes themselves")


def _shape_of_width(width: int, n_weights: int, source: ModelSpec) -> Shape | None:
    """A shape of `n_weights` in its layers, or None where the layers would be too few or of odd proportions."""
    heads = _heads_of_width(width, source)
    if heads is None:
        return None
    n_heads, n_kv_heads, head_dim = heads
    attention = 2 * width * (n_heads + n_kv_heads) * head_dim
    n_layers = max(round(n_weights / (attention + 3 * width * 2.75 * width)), 8, width // 128, source.n_layers)
    neurons = round((n_weights / n_layers - attention) / (3 * width) / 32) * 32
    if not max(2 * width, source.intermediate_size) <= neurons <= 4 * width:
        return None
    return Shape(width, n_layers, n_heads, n_kv_heads, head_dim, neurons)


def _heads_of_width(width: int, source: ModelSpec) -> tuple[int, int, int] | None:
    """(heads, key-value heads, head_dim) to hold the source's: the widest exact heads up to 128, in large groups."""
    head_dims = [source.head_dim * 4**j for j in range(4) if j == 0 or source.head_dim * 4**j <= 128]
    for head_dim in reversed(head_dims):
        n_heads = width // head_dim
        for group in (4, 2, 1):
            if width % head_dim or n_heads < group or n_heads % group:
                continue
            if kv_copies(source, n_heads, n_heads // group) * source.n_kv_heads <= n_heads // group:
                return n_heads, n_heads // group, head_dim
    return None


def check(source: ModelSpec, target: ModelSpec) -> None:
    """Raises UnsupportedModelError for a source that cannot be expanded, SettingsError for a target too small."""
    has_biases = source.qkv_bias or source.o_bias or source.mlp_bias
    if source.family != "llama" or has_biases:
        have = f"a {source.family}" + " with biases" * has_biases
        raise UnsupportedModelError("the source cannot be expanded", need="a llama without biases", have=have)
    names = {"--hidden-size": "hidden_size", "--layers": "n_layers", "--intermediate-size": "intermediate_size",
             "--max-position-embeddings": "max_positions"}  # fmt: skip
    for flag, name in names.items():
        need, have = getattr(source, name), getattr(target, name)
        if have < need:
            raise SettingsError(f"{flag} is too small", need=f"at least {need}", have=str(have), change=f"raise {flag}")
    if target.head_dim % source.head_dim:
        need = f"a multiple of the source's {source.head_dim}"
        raise SettingsError(f"--head-dim is {target.head_dim}", need=need, change="change --head-dim")
    need = kv_copies(source, target.n_heads, target.n_kv_heads) * source.n_kv_heads
    if need > target.n_kv_heads:
        group = target.n_heads // target.n_kv_heads
        raise SettingsError(
            f"the source's {source.n_heads} heads do not fit", need=f"{need} key-value heads of {group} queries each",
            have=str(target.n_kv_heads), change="raise --heads or --kv-heads",
        )  # fmt: skip
    _check_rope(source, target)


def _check_rope(source: ModelSpec, target: ModelSpec) -> None:
    # The last two lengths are past the limit, where the frequencies of some ropes begin to change.
    lengths = torch.tensor([2, source.max_positions, 2 * target.max_positions, 8 * target.max_positions])
    narrow, wide = (torch.stack(spec.rope.cos_sin(lengths - 1, lengths, torch.float32)) for spec in (source, target))
    if not torch.equal(narrow, wide[..., rotary_dims(source, target)]):
        raise UnsupportedModelError(
            "the source's scaled rotary embedding would turn otherwise in the target",
            change="keep the source's --head-dim and --max-position-embeddings",
        )


def target_config(source: Checkpoint, shape: Shape, dtype: str, max_positions: int | None) -> dict[str, Any]:
    """The target's config.json."""
    raw = read_json(source.directory / "config.json")
    raw.pop("torch_dtype", None)
    raw |= asdict(shape) | {"tie_word_embeddings": False, "dtype": dtype}
    raw["max_position_embeddings"] = source.spec.max_positions if max_positions is None else max_positions
    residual = residual_of(source.spec, spec_of(raw))
    return raw | {"rms_norm_eps": source.spec.eps * residual.mean_square}


def fingerprint(source: Checkpoint) -> str:
    """SHA-256 of all files of the source that the target is made from."""
    digest = hashlib.sha256()
    weights = {record.path for records in (*source.layers, source.outer) for record in records}
    for path in sorted({source.directory / "config.json", *weights, *companions(source.directory)}):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def companions(directory: Path) -> list[Path]:
    """The files beside the weights that a checkpoint of the same vocabulary needs too."""
    return sorted({path for pattern in COMPANIONS for path in directory.glob(pattern) if path.is_file()})


def is_there(out: Path, recipe: dict[str, Any], source: Path) -> bool:
    """Whether `out` holds this very expansion, whole; an older one of the same recipe may be replaced.

    Raises SettingsError if it holds anything else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        old = read_json(out / RECIPE)
    except CheckpointError:
        old = {}
    renewed = {key: recipe[key] for key in ("version", "source")}
    if out == source.resolve() or old | renewed != recipe:
        raise SettingsError(f"{out} already holds something else", change="delete it or give another --out")
    try:
        open_checkpoint(out)
    except OffloadError:
        return False
    return old == recipe and all((out / path.name).exists() for path in companions(source))


def write(expansion: Expansion, source: Checkpoint, config: dict[str, Any], recipe: dict[str, Any], out: Path) -> None:
    """Write all files to a directory beside `out` and rename it; on any failure nothing of it stays."""
    target, itemsize = spec_of(config), DTYPES[recipe["dtype"]].itemsize
    files = shards(target, itemsize, recipe["shard_nbytes"])
    _check_disk(out.parent, sum(piece.nbytes(itemsize) for file in files for piece in file))
    partial, old = (out.parent / f".{out.name}.{os.getpid()}.{end}" for end in ("partial", "old"))
    try:
        partial.mkdir()
        _write_weights(expansion, files, itemsize, partial)
        for path in companions(source.directory):
            shutil.copyfile(path, partial / path.name)
        _write_json(partial / "config.json", config)
        _write_json(partial / RECIPE, recipe)
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _check_disk(directory: Path, nbytes: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < nbytes + 2**20:
        raise CapacityError(
            f"the disk of {directory} is too full", need=format_size(nbytes + 2**20), have=format_size(free),
            change="free some space or give a smaller shape",
        )  # fmt: skip


def _write_weights(expansion: Expansion, files: list[list[Piece]], itemsize: int, directory: Path) -> None:
    where, begun = {}, time.monotonic()
    for i, file in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        tensors = {piece.name: expansion.tensor(piece) for piece in file}
        try:
            save_file(tensors, directory / name, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OffloadError(f"{name} could not be written ({error})", change="give another --out") from error
        del tensors  # else the next shard is made while this one is still held
        _sync(directory / name)
        where |= dict.fromkeys((piece.name for piece in file), name)
        elapsed_s = time.monotonic() - begun
        print(f"expand: {i + 1} of {len(files)} shards written, {elapsed_s:.1f} s", file=sys.stderr, flush=True)
    total = sum(math.prod(piece.shape) * itemsize for file in files for piece in file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def chosen_shape(args: argparse.Namespace, source: ModelSpec, itemsize: int) -> Shape:
    """The shape that the flags ask for; single sizes change the one of --like, or the source's own."""
    given = {item.name: getattr(args, item.name) for item in fields(Shape) if getattr(args, item.name) is not None}
    if args.size is not None:
        if given:
            raise SettingsError("--size chooses the shape by itself", change="give either --size or single sizes")
        return shape_for(parse_size(args.size), source, itemsize)
    names = ("hidden_size", "n_layers", "n_heads", "n_kv_heads", "head_dim", "intermediate_size")
    own = Shape(*(getattr(source, name) for name in names))
    return replace(LLAMAS[args.like] if args.like else own, **given)


def expand(args: argparse.Namespace) -> None:
    """Do what the flags ask for. Raises OffloadError, with nothing left behind."""
    source = open_checkpoint(locate(args.source, offline=True))
    dtype = args.dtype or str(source.outer[0].torch_dtype()).removeprefix("torch.")
    if dtype not in DTYPES:
        raise SettingsError(f"the source's dtype {dtype} is not written", have=", ".join(DTYPES), change="give --dtype")
    shape = chosen_shape(args, source.spec, DTYPES[dtype].itemsize)
    config = target_config(source, shape, dtype, args.max_position_embeddings)
    target, out = spec_of(config), Path(args.out).expanduser().resolve()
    check(source.spec, target)
    recipe = {
        "version": VERSION, "source": fingerprint(source), **asdict(shape), "dtype": dtype, "seed": args.seed,
        "max_position_embeddings": target.max_positions, "shard_nbytes": parse_size(args.shard_size),
    }  # fmt: skip
    if is_there(out, recipe, source.directory):
        print(f"expand: {out} is already there", file=sys.stderr)
        return
    residual = residual_of(source.spec, target)
    _tell(shape, source.spec, residual)
    write(Expansion(source, target, residual, DTYPES[dtype], args.seed), source, config, recipe, out)


def _tell(shape: Shape, source: ModelSpec, residual: Residual) -> None:
    factors = (math.sqrt(residual.mean_square), math.sqrt(shape.head_dim / source.head_dim))
    is_exact = all(math.frexp(factor)[0] == 0.5 for factor in factors)
    sizes = ", ".join(f"{name} {value}" for name, value in asdict(shape).items())
    how = "weights scaled by powers of two only" if is_exact else "norms or queries rounded"
    print(f"expand: {sizes}; {how}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    flags = argparse.ArgumentParser(description="Write a larger checkpoint that computes the same function.")
    flags.add_argument("--source", default="models/demo-target", help="directory of a Llama checkpoint")
    flags.add_argument("--out", required=True, help="directory to write")
    shape = flags.add_mutually_exclusive_group()
    shape.add_argument("--like", choices=LLAMAS, help="take the shape of this model")
    shape.add_argument("--size", help='choose a shape of about this size, like "1.5GB"')
    sizes = ("--hidden-size", "--layers", "--heads", "--kv-heads", "--head-dim", "--intermediate-size")
    for flag, item in zip(sizes, fields(Shape), strict=True):
        flags.add_argument(flag, dest=item.name, type=int, metavar="N", help="default: that of --like, or the source's")
    flags.add_argument("--max-position-embeddings", type=int, metavar="N", help="default: the source's")
    flags.add_argument("--shard-size", default="1GiB", help="most bytes of one file, and about what is held in memory")
    flags.add_argument("--seed", type=int, default=0, help="of the values that cannot matter")
    flags.add_argument("--dtype", choices=DTYPES, help="of the written weights; default: the source's")
    return flags


def main(argv: list[str] | None = None) -> int:
    """Run the command; the exit code is 2 for a user's error, 3 for the machine's, 130 for an interrupt."""
    try:
        expand(parser().parse_args(argv))
    except OffloadError as error:
        print(f"expand: {error}", file=sys.stderr)
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

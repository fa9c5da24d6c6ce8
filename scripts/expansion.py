"""Placement of a small Llama's weights in a larger Llama with the same function.

The wide residual contains the narrow residual, copies that make the norms exact, and zeros. Added
heads and neurons read only zeros. Therefore they write zeros, for arbitrary weights.
"""

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from safetensors import safe_open
from torch import Tensor

from offload_rt.config import format_size
from offload_rt.errors import CapacityError, SettingsError, UnsupportedModelError
from offload_rt.models.native import NativeDecoder
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.header import TensorRecord

CHUNK = 2**20
POOL = 2**25
# Upper bound of a tensor's bytes in the header of a safetensors file.
HEADER_ENTRY = 512


@dataclass(frozen=True)
class Shape:
    """Expandable sizes of a Llama, named as in config.json."""

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
    """Wide residual: `width` narrow values times each scale, then zeros; scales[0] is 1."""

    width: int
    scales: tuple[float, ...]
    wide: int

    @property
    def live(self) -> int:
        """Dimensions that may be nonzero."""
        return self.width * len(self.scales)

    @property
    def mean_square(self) -> float:
        """Mean square of the wide residual relative to the narrow residual."""
        return sum(scale**2 for scale in self.scales) * self.width / self.wide

    def spread(self, values: Tensor, dim: int) -> Tensor:
        """Repeat narrow values along `dim`, scaled, as in the wide residual."""
        return torch.cat([values * scale for scale in self.scales], dim)


@dataclass(frozen=True)
class Placement:
    """Placement of a weight's rows, or of its columns if the weight writes the residual.

    rows    (n,) int64 indices in the target
    origin  (n,) int64 indices in the source
    silent  (s,) int64 indices in the target without reads or writes, including `rows`
    scale   factor
    """

    rows: Tensor
    origin: Tensor
    silent: Tensor
    scale: float = 1.0


@dataclass(frozen=True)
class Piece:
    """Tensor to write, with the name `kind` in decoder layer `layer`, or outside the layers."""

    layer: int | None
    kind: str
    name: str
    shape: tuple[int, ...]

    def nbytes(self, itemsize: int) -> int:
        """Bytes in a file, header included."""
        return math.prod(self.shape) * itemsize + HEADER_ENTRY


class Noise:
    """Random values of ordinary size, determined by seed and tensor name."""

    def __init__(self, seed: int, n_values: int) -> None:
        self._seed = seed
        self._pool = torch.randn(
            min(max(n_values, 2 * CHUNK), POOL), generator=torch.Generator().manual_seed(seed)
        )

    def fill(self, name: str, shape: tuple[int, ...], sigma: float, dtype: torch.dtype) -> Tensor:
        """Return a normal tensor with mean zero and standard deviation `sigma`."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        out = torch.empty(shape, dtype=dtype)
        chunks = out.view(-1).split(CHUNK)
        starts = torch.randint(
            len(self._pool) - CHUNK, (len(chunks), 2), generator=generator
        ).tolist()
        # Drawing every value is several times slower. The sum of two stretches of a pool is normal
        # as well, and not compressible: a repetition needs two stretches at an equal distance.
        for chunk, (first, second) in zip(chunks, starts, strict=True):
            total = (
                self._pool[first : first + len(chunk)] + self._pool[second : second + len(chunk)]
            )
            torch.mul(total, sigma * math.sqrt(0.5), out=chunk)
        return out


class Expansion:
    """Tensors of the target, computed from the source on request."""

    def __init__(
        self,
        source: Checkpoint,
        target: NativeDecoder,
        residual: Residual,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        n_layers = source.spec.n_layers
        self._source = source
        self._residual = residual
        self._dtype = dtype
        self._origin = {i * target.n_layers // n_layers: i for i in range(n_layers)}
        self._placements = placements(source.spec, target)
        self._noise = Noise(
            seed, sum(math.prod(piece.shape) for group in pieces(target) for piece in group)
        )

    def tensor(self, piece: Piece) -> Tensor:
        """Return a tensor of the target, in its dtype."""
        if piece.layer is None:
            return self._load_non_layer(piece)
        nearest = max(i for i in self._origin if i <= piece.layer)
        origin = self._source.layers[self._origin[nearest]]
        weight = _read(next(record for record in origin if record.key == piece.kind))
        is_real = nearest == piece.layer
        if len(piece.shape) == 1:
            return self._norm(piece, weight if is_real else None)
        out = self._random(piece, weight)
        part = piece.kind.split(".")[1]
        place = self._placements[part] if is_real else _idle(self._placements[part], part)
        (self._place_writer if part in ("o_proj", "down_proj") else self._place_reader)(
            out, weight, place
        )
        return out

    def _load_non_layer(self, piece: Piece) -> Tensor:
        """Return embedding, last norm or head; the head of a tied source is its embedding."""
        embed, norm, *head = self._source.non_layer
        if len(piece.shape) == 1:
            return self._norm(piece, _read(norm))
        if piece.name == embed.name:
            out = torch.zeros(piece.shape, dtype=self._dtype)
            out[:, : self._residual.live] = self._residual.spread(_read(embed), dim=1).to(
                self._dtype
            )
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
        """Copy source rows into `out` (rows, wide residual); zero their weights for copies."""
        out[place.silent, : self._residual.live] = 0
        out[place.rows, : self._residual.width] = (weight[place.origin] * place.scale).to(out.dtype)

    def _place_writer(self, out: Tensor, weight: Tensor, place: Placement) -> None:
        """Copy source columns into `out` (wide residual, columns), once per copy."""
        out[:, place.silent] = 0
        out[: self._residual.live, place.rows] = self._residual.spread(
            weight[:, place.origin], dim=0
        ).to(out.dtype)


def _idle(place: Placement, part: str) -> Placement:
    """Return the placement in an added layer, which adds zero.

    Its value and up projections read nothing.
    """
    none = place.rows[:0]
    return Placement(none, none, place.silent if part in ("v_proj", "up_proj") else none)


def _read(record: TensorRecord) -> Tensor:
    with safe_open(record.path, "pt") as file:
        return file.get_tensor(record.name).float()


def residual_of(source: NativeDecoder, target: NativeDecoder) -> Residual:
    """Select copies such that norms are scaled by a power of two.

    The ratio of mean squares must be a power of 1/4. A width ratio n 4^k with 1 <= n < 4 needs
    squared scales with sum n; the base-4 digits of the ratio are their counts.
    """
    ratio, rest = divmod(target.hidden_size, source.hidden_size)
    if rest or not ratio:
        return Residual(source.hidden_size, (1.0,), target.hidden_size)
    k = (ratio.bit_length() - 1) // 2
    scales = [1.0]
    left = ratio - 4**k
    for place in range(k, -1, -1):
        digit, left = divmod(left, 4**place)
        scales += [2.0 ** (place - k)] * digit
    return Residual(source.hidden_size, tuple(scales), target.hidden_size)


def kv_copies(source: NativeDecoder, n_heads: int, n_kv_heads: int) -> int:
    """Return the copies of a source key-value head that its query heads need in the target."""
    return math.ceil(source.n_heads // source.n_kv_heads / (n_heads // n_kv_heads))


def rotary_dims(source: NativeDecoder, target: NativeDecoder) -> Tensor:
    """Return the wide head's dimensions with the narrow head's frequencies.

    (narrow head_dim,) int64
    """
    pairs = torch.arange(source.head_dim // 2) * (target.head_dim // source.head_dim)
    return torch.cat((pairs, pairs + target.head_dim // 2))


def placements(source: NativeDecoder, target: NativeDecoder) -> dict[str, Placement]:
    """Return the placement of each matrix of a source layer in a target layer."""
    group, wide_group = (spec.n_heads // spec.n_kv_heads for spec in (source, target))
    copies = kv_copies(source, target.n_heads, target.n_kv_heads)
    heads = torch.arange(source.n_heads)
    slots = (
        heads // group * copies + heads % group // wide_group
    ) * wide_group + heads % group % wide_group
    kv_slots = torch.arange(source.n_kv_heads * copies)
    # A free query slot of a used key-value head attends to real values: its output must be unused.
    readable = torch.arange(len(kv_slots) * wide_group)
    plain = torch.arange(source.head_dim)
    rotary = rotary_dims(source, target)
    every = torch.arange(target.head_dim)

    def dims(heads: Tensor, within: Tensor, head_dim: int = target.head_dim) -> Tensor:
        return (heads[:, None] * head_dim + within).flatten()

    q_origin = dims(heads, plain, source.head_dim)
    kv_origin = dims(kv_slots // copies, plain, source.head_dim)
    q_rows = dims(slots, rotary)
    k_rows = dims(kv_slots, rotary)
    mlp = torch.arange(source.intermediate_size)
    all_kv = torch.arange(target.n_kv_heads * target.head_dim)
    all_mlp = torch.arange(target.intermediate_size)
    return {
        "q_proj": Placement(
            q_rows, q_origin, dims(slots, every), math.sqrt(target.head_dim / source.head_dim)
        ),
        "k_proj": Placement(k_rows, kv_origin, k_rows),
        "v_proj": Placement(dims(kv_slots, plain), kv_origin, all_kv),
        "o_proj": Placement(dims(slots, plain), q_origin, dims(readable, plain)),
        "gate_proj": Placement(mlp, mlp, mlp),
        "up_proj": Placement(mlp, mlp, all_mlp),
        "down_proj": Placement(mlp, mlp, mlp),
    }


def pieces(target: NativeDecoder) -> list[list[Piece]]:
    """Return the target's tensors in order of use, grouped by preferred file."""
    embed, *last = (Piece(None, name, name, shape) for name, shape in target.non_layer_tensors())
    layers = (
        [
            Piece(i, kind, target.layer_prefix(i) + kind, shape)
            for kind, shape in target.layer_tensors(i)
        ]
        for i in range(target.n_layers)
    )
    return [[embed], *layers, last]


def shards(target: NativeDecoder, itemsize: int, limit: int) -> list[list[Piece]]:
    """Return the tensors of each file; raises CapacityError for a tensor above the limit."""
    files: list[list[Piece]] = [[]]
    room = limit
    for group in pieces(target):
        if sum(piece.nbytes(itemsize) for piece in group) > room:
            files = [*files, []]
            room = limit
        for piece in group:
            nbytes = piece.nbytes(itemsize)
            if nbytes > limit:
                raise CapacityError(
                    f"{piece.name} does not fit a "
                    f"shard", need=format_size(nbytes), have=format_size(limit),
                    change="raise --shard-size",
                )  # fmt: skip
            if nbytes > room:
                files = [*files, []]
                room = limit
            files[-1].append(piece)
            room -= nbytes
    return [file for file in files if file]


def shape_for(nbytes: int, source: NativeDecoder, itemsize: int) -> Shape:
    """Return the widest Llama of about `nbytes` with a common depth.

    Raises CapacityError if `nbytes` is too small.
    """
    widths = sorted(
        {source.hidden_size * factor * 2**j for factor in (1, 3) for j in range(8)}, reverse=True
    )
    for width in widths:
        shape = _shape_of_width(width, nbytes // itemsize - 2 * source.vocab_size * width, source)
        if shape is not None:
            return shape
    problem = f"no model of {format_size(nbytes)} holds the source"
    raise CapacityError(problem, change="raise --size, or give the sizes themselves")


def wider_mlp(nbytes: int, source: NativeDecoder, itemsize: int) -> Shape:
    """Return the source's shape with an MLP such that the target has about `nbytes`.

    Raises CapacityError if `nbytes` is too small.
    """
    shape = shape_of(source)
    n_weights = nbytes // itemsize - 2 * source.vocab_size * shape.hidden_size
    n_heads = shape.num_attention_heads + shape.num_key_value_heads
    attention = 2 * shape.hidden_size * n_heads * shape.head_dim
    neurons = (n_weights / shape.num_hidden_layers - attention) / (3 * shape.hidden_size)
    if neurons < source.intermediate_size:
        problem = f"the source needs more than {format_size(nbytes)}"
        raise CapacityError(problem, change="raise --size")
    return replace(shape, intermediate_size=round(neurons / 32) * 32)


def shape_of(source: NativeDecoder) -> Shape:
    """Return the shape of the source."""
    return Shape(
        source.hidden_size,
        source.n_layers,
        source.n_heads,
        source.n_kv_heads,
        source.head_dim,
        source.intermediate_size,
    )


def _shape_of_width(width: int, n_weights: int, source: NativeDecoder) -> Shape | None:
    """Return a shape with `n_weights` in its layers, or None for uncommon proportions."""
    heads = _heads_of_width(width, source)
    if heads is None:
        return None
    n_heads, n_kv_heads, head_dim = heads
    attention = 2 * width * (n_heads + n_kv_heads) * head_dim
    n_layers = max(
        round(n_weights / (attention + 3 * width * 2.75 * width)), 8, width // 128, source.n_layers
    )
    neurons = round((n_weights / n_layers - attention) / (3 * width) / 32) * 32
    if not max(2 * width, source.intermediate_size) <= neurons <= 4 * width:
        return None
    return Shape(width, n_layers, n_heads, n_kv_heads, head_dim, neurons)


def _heads_of_width(width: int, source: NativeDecoder) -> tuple[int, int, int] | None:
    """Return (heads, key-value heads, head_dim) for the source's heads, or None.

    Prefers the widest exact heads up to 128, then large groups.
    """
    head_dims = [
        source.head_dim * 4**j for j in range(4) if j == 0 or source.head_dim * 4**j <= 128
    ]
    for head_dim in reversed(head_dims):
        n_heads = width // head_dim
        for group in (4, 2, 1):
            if width % head_dim or n_heads < group or n_heads % group:
                continue
            if kv_copies(source, n_heads, n_heads // group) * source.n_kv_heads <= n_heads // group:
                return n_heads, n_heads // group, head_dim
    return None


def check(source: NativeDecoder, target: NativeDecoder) -> None:
    """Raise UnsupportedModelError for an unsupported source, SettingsError for a small target."""
    has_biases = source.qkv_bias or source.o_bias or source.mlp_bias
    if source.family != "llama" or has_biases:
        have = f"a {source.family}" + " with biases" * has_biases
        raise UnsupportedModelError(
            "the source cannot be expanded", need="a llama without biases", have=have
        )
    names = {"--hidden-size": "hidden_size", "--layers": "n_layers",
        "--intermediate-size": "intermediate_size",
             "--max-position-embeddings": "max_positions"}  # fmt: skip
    for flag, name in names.items():
        need = getattr(source, name)
        have = getattr(target, name)
        if have < need:
            raise SettingsError(
                f"{flag} is too small",
                need=f"at least {need}",
                have=str(have),
                change=f"raise {flag}",
            )
    if target.head_dim % source.head_dim:
        need = f"a multiple of the source's {source.head_dim}"
        raise SettingsError(
            f"--head-dim is {target.head_dim}", need=need, change="change --head-dim"
        )
    need = kv_copies(source, target.n_heads, target.n_kv_heads) * source.n_kv_heads
    if need > target.n_kv_heads:
        group = target.n_heads // target.n_kv_heads
        raise SettingsError(
            f"the source's {source.n_heads} heads do not "
            f"fit", need=f"{need} key-value heads of {group} queries each",
            have=str(target.n_kv_heads), change="raise --heads or --kv-heads",
        )  # fmt: skip
    _check_rope(source, target)


def _check_rope(source: NativeDecoder, target: NativeDecoder) -> None:
    # Beyond the limit, at the last two lengths, the frequencies of some ropes change.
    lengths = torch.tensor(
        [2, source.max_positions, 2 * target.max_positions, 8 * target.max_positions]
    )
    narrow, wide = (
        torch.stack(spec.rope.cos_sin(lengths - 1, lengths, torch.float32))
        for spec in (source, target)
    )
    if not torch.equal(narrow, wide[..., rotary_dims(source, target)]):
        raise UnsupportedModelError(
            "the source's scaled rotary embedding would turn otherwise in the target",
            change="keep the source's --head-dim and --max-position-embeddings",
        )

"""Decoder layers on a CPU in one call: norms, products, rotary embedding, attention, gated SiLU.

See `decode_layers` of csrc/layer_cpu.h; layer_cpu.cpp defines the structures. The numbers equal
those of the single operations.
"""

import ctypes
from collections.abc import Sequence
from ctypes import Structure
from typing import NamedTuple

from torch import Tensor

from offload_rt.ops import cpu, linear_cpu
from offload_rt.ops.cpu import ADDRESS, FLOAT, INT, SIZE
from offload_rt.ops.dequantize import Weight
from offload_rt.ops.tree_mask import TreeMask


class _Layer(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "input_norm output_norm q_norm k_norm"), (SIZE, "index window has_pairs"),
        (linear_cpu.MatrixStruct, "q k v o gate up down"),
    )  # fmt: skip


class _Segment(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "keys values bits depths"), (SIZE, "n first n_words n_before n_tree"),
        (SIZE, "key_layer key_head key_row value_layer value_head value_row"),
    )  # fmt: skip


class _Pass(Structure):
    _fields_ = cpu.fields(
        (ADDRESS, "x cos sin layers segments"), (SIZE, "n n_layers n_segments"),
        (SIZE, "x_row cos_row sin_row n_heads n_kv_heads dim"), (FLOAT, "eps scale"),
        (INT, "dtype"),
    )  # fmt: skip


class Sizes(NamedTuple):
    """Sizes of all layers: query heads, KV heads, head dimension, and epsilon of the norms."""

    n_heads: int
    n_kv_heads: int
    dim: int
    eps: float


class CachedRows(NamedTuple):
    """Rows of a sequence in a pass, and the memory of its keys and values.

    n             number of rows
    keys, values  (n_layers, n_kv_heads, capacity, head_dim)
    first         cache row of the first row
    mask          visibility, without a window
    """

    n: int
    keys: Tensor
    values: Tensor
    first: int
    mask: TreeMask


class Layer(NamedTuple):
    """Weights of a layer as the library reads them, valid as long as their tensors."""

    struct: _Layer
    tensors: tuple[object, ...]


def layer(
    i: int,
    norms: Sequence[Tensor | None],
    matrices: Sequence[tuple[Weight, Tensor | None]],
    window: int | None,
    has_pairs: bool,
) -> Layer | None:
    """Describe layer i; None if the library does not serve it.

    norms      of the layer's and of the MLP's input, of query and key heads or None
    matrices   q, k, v, o, gate, up and down, each (n_out, n_in) and a bias (n_out,) or None
    has_pairs  rows of q and k are stored with the partners of a rotation side by side
    """
    x = norms[0]
    assert x is not None, "every layer norms its input"
    vectors = [norm for norm in norms if norm is not None]
    if not all(norm.dtype == x.dtype and not norm.requires_grad for norm in vectors):
        return None
    if not all(linear_cpu.serves(x, weight) for weight, _ in matrices):
        return None
    n_q, n_kv, n_v, n_o, n_gate, n_up, n_down = (weight.shape for weight, _ in matrices)
    expected = (n_q[0], len(x)), (n_kv[0], len(x)), n_kv, (len(x), n_q[0])
    assert (n_q, n_kv, n_v, n_o) == expected, "the kernel would read other memory"
    assert (n_up, n_down) == (n_gate, (len(x), n_gate[0])), "the kernel would read other memory"
    described = (linear_cpu.describe(weight, bias) for weight, bias in matrices)
    struct = _Layer(*cpu.addresses(*norms), i, window or 0, has_pairs, *described)
    return Layer(struct, (*norms, *matrices))


def decode(
    x: Tensor,
    layers: Sequence[Layer],
    sizes: Sizes,
    rotary: tuple[Tensor, Tensor],
    segments: Sequence[CachedRows],
) -> bool:
    """Apply layers to x (n, hidden_size) in place; False if the library does not serve x.

    rotary    cosines and sines (n, head_dim)
    segments  in the order of their rows
    """
    caches = [part for segment in segments for part in (segment.keys, segment.values)]
    if any(
        tensor.dtype != x.dtype or tensor.stride(-1) != 1 or tensor.device.type != "cpu"
        for tensor in (x, *rotary, *caches)
    ):
        return False
    structs = (_Segment * len(segments))(*map(_segment, segments))
    pointers = (ctypes.c_void_p * len(layers))(*(ctypes.addressof(part.struct) for part in layers))
    cos, sin = rotary
    arguments = _Pass(
        *cpu.addresses(x, cos, sin), ctypes.addressof(pointers), ctypes.addressof(structs), len(x),
        len(layers), len(segments), x.stride(0), cos.stride(0), sin.stride(0), *sizes,
        sizes.dim**-0.5, cpu.DTYPES[x.dtype],
    )  # fmt: skip
    cpu.call("offload_rt_decode_layers", arguments)
    return True


def _segment(rows: CachedRows) -> _Segment:
    bits, depths = rows.mask.bits, rows.mask.depths
    assert bits.is_contiguous() and depths.is_contiguous()
    pointers = cpu.addresses(rows.keys, rows.values, bits, depths)
    extent = rows.mask.extent.tolist()
    strides = *rows.keys.stride()[:3], *rows.values.stride()[:3]
    return _Segment(*pointers, rows.n, rows.first, bits.shape[1], *extent, *strides)

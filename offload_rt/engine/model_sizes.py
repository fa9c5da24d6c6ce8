"""Sizes of a model in memory, from its checkpoint or from its architecture alone."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from offload_rt.cost.roofline import n_weights
from offload_rt.dtypes import DType
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import TensorShape
from offload_rt.offload.placement import ExpertSizes, LinkSizes
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.formats import Matrix, Source, WeightFormat, dense
from offload_rt.weights.layout import Layout, packed_layout
from offload_rt.weights.rounding import COPIES, COPY_DTYPE, rounded_layout

Tensors = Iterable[tuple[str, tuple[int, ...], DType]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model in memory.

    dtype             of the weights
    view_nbytes       scratch bytes of products on a card, e.g. a dequantised matrix
    host_view_nbytes  the same on a CPU
    stand_in          bytes of a layer's copy, for the copies of a self-drafting target
    link              sizes of the layers in transfer; None if equal
    experts           experts as separate blocks; None if experts are part of their layers
    divided           returns the sizes with experts as separate blocks; None to compute them from
                      the shapes of the architecture
    rounding          format of weights quantised while they are loaded; "none" otherwise
    images            bytes of the vision tower, its activations and features; 0 without images
    streamed_images   bytes of the vision tower that stay on disk
    head_share        stored bytes of the output matrix, relative to its bytes in `dtype`
    matrix            largest quantised matrix of the layers, for timing; None for plain weights
    """

    spec: Architecture
    layer_nbytes: tuple[int, ...]
    non_layer_nbytes: int
    dtype: DType
    view_nbytes: int = 0
    host_view_nbytes: int = 0
    stand_in: int = 0
    link: LinkSizes | None = None
    experts: ExpertSizes | None = None
    divided: "Callable[[], Sizes | None] | None" = field(default=None, compare=False, repr=False)
    rounding: str = "none"
    images: int = 0
    streamed_images: int = 0
    head_share: float = 1.0
    matrix: Matrix | None = field(default=None, compare=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.layer_nbytes) + self.non_layer_nbytes

    def by_expert(self) -> "Sizes | None":
        """Return the sizes with experts as separate blocks; None if impossible."""
        mixture = self.spec.mixture
        if mixture is None or self.link is not None:
            return None
        if self.divided is not None:
            return self.divided()
        layers = list(self.layer_nbytes)
        nbytes = {i: _expert_nbytes(self, i) for i in mixture.layers}
        for i, expert_nbytes in nbytes.items():
            layers[i] -= expert_nbytes * mixture.n_experts
        experts = ExpertSizes(mixture, max(nbytes.values()))
        return replace(self, layer_nbytes=tuple(layers), experts=experts)

    def rounded(self, rounding: str) -> "Sizes":
        """Return the sizes after quantisation while loading, see `weights.rounding`."""
        if rounding == self.rounding:
            return self
        dtype = self.dtype

        def layout(tensors: Iterable[TensorShape]) -> Layout:
            return rounded_layout(((name, shape, dtype) for name, shape in tensors), rounding)

        layers = _layer_layouts(self.spec, layout)
        non_layer = layout(self.spec.non_layer_tensors())
        heads = tuple(non_layer.matrices.values())
        head_nbytes = sum(non_layer.by_name[part.name].nbytes for m in heads for part in m.tensors)
        plain_nbytes = sum(math.prod(matrix.shape) for matrix in heads) * dtype.itemsize
        view_nbytes, host_view_nbytes = _scratch_nbytes((*layers, non_layer), dtype)
        return replace(
            self,
            layer_nbytes=tuple(layer.nbytes for layer in layers),
            non_layer_nbytes=non_layer.nbytes,
            view_nbytes=max(self.view_nbytes, view_nbytes),
            host_view_nbytes=max(self.host_view_nbytes, host_view_nbytes),
            rounding=rounding,
            head_share=head_nbytes / plain_nbytes if heads else 1.0,
            matrix=_largest(layers),
        )

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, dtype: DType) -> "Sizes":
        """Return the sizes of stored tensors, for compute in `dtype`."""
        blocks = [block.layout for block in checkpoint.blocks]
        layers = tuple(layer.nbytes for layer in checkpoint.layers)
        nbytes = layers, checkpoint.non_layer.nbytes
        stored = dtype if checkpoint.spec.taps else checkpoint.dtype
        views = _scratch_nbytes(blocks, dtype)
        return cls(checkpoint.spec, *nbytes, stored, *views, matrix=_largest(blocks[: len(layers)]))

    @classmethod
    def of_copies(cls, spec: Architecture, layers: Iterable[Tensors]) -> "Sizes":
        """Return the sizes of 4-bit copies of layers, given (name, shape, dtype) of each layer."""
        layouts = [rounded_layout(layer, COPIES) for layer in layers]
        return cls(
            spec, (0,) * spec.n_layers, 0, COPY_DTYPE,
            stand_in=max(layout.nbytes for layout in layouts), matrix=_largest(layouts),
        )  # fmt: skip

    @classmethod
    def of_spec(
        cls, spec: Architecture, dtype: DType, layer_format: WeightFormat | None = None
    ) -> "Sizes":
        """Return the sizes of an architecture in device layout, with layers in a format."""
        stores: WeightFormat = layer_format or dense.Format(None)

        def layout(layer: Iterable[TensorShape]) -> Layout:
            names = (part for tensor in layer for part in _matrices(tensor))
            stored = {name: stores.stored(name, shape, dtype, Source({})) for name, shape in names}
            parts = (part for tensor in stored.values() for part in tensor.tensors)
            matrices = {
                name.removesuffix(".weight"): part
                for name, part in stored.items()
                if isinstance(part, Matrix)
            }
            tensors = ((part.name, part.shape, part.dtype or dtype) for part in parts)
            return packed_layout(tensors, matrices)

        layers = _layer_layouts(spec, layout)
        nbytes = tuple(layer.nbytes for layer in layers)
        rest_nbytes = n_weights(spec.non_layer_tensors()) * dtype.itemsize
        views = _scratch_nbytes(layers, dtype)
        return cls(spec, nbytes, rest_nbytes, dtype, *views, matrix=_largest(layers))


def _layer_layouts(
    spec: Architecture, layout: Callable[[Iterable[TensorShape]], Layout]
) -> list[Layout]:
    """Return the layout of each layer, computed once per kind: most layers are equal."""
    return list(map(cache(layout), map(spec.layer_tensors, range(spec.n_layers))))


def _largest(layouts: Iterable[Layout]) -> Matrix | None:
    matrices = (matrix for layout in layouts for matrix in layout.matrices.values())
    return max(matrices, key=lambda matrix: math.prod(matrix.shape), default=None)


def _scratch_nbytes(layouts: Sequence[Layout], dtype: DType) -> tuple[int, int]:
    """Return the bytes of the largest copy for compute in `dtype`, on a card and on a CPU."""
    on_card = max((layout.scratch_nbytes(dtype, True) for layout in layouts), default=0)
    return on_card, max((layout.scratch_nbytes(dtype, False) for layout in layouts), default=0)


def _expert_nbytes(sizes: Sizes, i: int) -> int:
    """Return the bytes of an expert of layer i; other tensors are not quantised."""
    spec = sizes.spec
    assert spec.mixture is not None
    names = spec.expert_names(i).keys()
    rest = [
        tensor
        for tensor in spec.layer_tensors(i)
        if not names & {tensor.name, tensor.name.rpartition(".")[0]}
    ]
    rest_nbytes = n_weights(rest) * sizes.dtype.itemsize
    return (sizes.layer_nbytes[i] - rest_nbytes) // spec.mixture.n_experts


def _matrices(tensor: TensorShape) -> list[TensorShape]:
    """Split a tensor of all experts into the matrices that checkpoints store."""
    name, shape = tensor
    if len(shape) != 3 or shape[1] == 1:  # a convolution
        return [tensor]
    return [TensorShape(f"{name}.{i}.weight", shape[1:]) for i in range(shape[0])]

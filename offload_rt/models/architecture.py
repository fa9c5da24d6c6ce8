"""Interface of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

from offload_rt.models.layers import (
    CachedContext,
    KVShape,
    LayerWeights,
    Mixture,
    Part,
    PassContext,
    StateShape,
    TensorShape,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from offload_rt.models.image_tower import ImageTower


@dataclass(frozen=True)
class Architecture(ABC):
    """A decoder-only model: sizes, tensors, computation.

    n_kv_heads, head_dim  KV heads and key dimension of the first layer
    dtype_name            dtype of the config, or None
    taps                  layer counts after which a draft head reads the target's hidden states;
                          empty for complete models
    tp_plan               transformers' tensor parallel plan, extended by further linear modules
    """

    # Notice for the user about limitations, printed at startup.
    notice: ClassVar[str] = ""
    # Capabilities. Callers query these, never the class.
    # Passes of equal shape launch equal kernels, so CUDA graphs apply.
    supports_graphs: ClassVar[bool] = True
    # The model can draft for itself, with views of its caches or 4-bit copies of its layers.
    supports_self_draft: ClassVar[bool] = True
    # Attention reads cache rows on the host or the disk.
    supports_offloaded_kv: ClassVar[bool] = True
    # `speculate.learner` can train the model.
    supports_training: ClassVar[bool] = True
    # `final_states` is implemented.
    supports_embeddings: ClassVar[bool] = False
    # `layer_group` computes several layers in one call.
    supports_layer_groups: ClassVar[bool] = False
    # `embed` computes layer inputs from token ids, so every pipeline stage runs it.
    embeds_on_all_stages: ClassVar[bool] = False

    family: str
    dtype_name: str | None
    n_layers: int
    vocab_size: int
    hidden_size: int
    n_kv_heads: int
    head_dim: int
    max_positions: int
    taps: tuple[int, ...] = field(default=(), kw_only=True)
    tp_plan: Mapping[str, str] = field(
        default_factory=dict, kw_only=True, compare=False, repr=False
    )

    def of_checkpoint(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Self, Mapping[str, Part]]:
        """Adapt to a checkpoint with tensors of these shapes; map tensor names to stored parts.

        Raises UnsupportedModelError if tensors would need conversion.
        """
        return self, {name: Part(name) for name in shapes}

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """KV shapes of the cache layers, indexed by the `layer` argument of `attend`."""
        return (KVShape(self.n_kv_heads, self.head_dim, self.head_dim),) * self.n_layers

    def kv_layers(self, i: int) -> Sequence[int]:
        """Return the cache layers that layer i writes."""
        return (i,)

    def kv_read(self, i: int) -> Collection[int]:
        """Return the cache layers that layer i reads, possibly written by earlier layers."""
        return self.kv_layers(i)

    @property
    def mixture(self) -> Mixture | None:
        """Layers with experts that can be loaded on demand, or None."""
        return None

    def expert_names(self, i: int) -> Mapping[str, int | None]:
        """Map module names of layer i to experts; None for tensors with a row per expert."""
        return {}

    @property
    def images(self) -> ImageTower | None:
        """Vision tower, or None for models of text."""
        return None

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """State shapes, indexed by the `layer` argument of `recur`; all are equal."""
        return ()

    @property
    def state_layers(self) -> Collection[int]:
        """Layers with a recurrent state, in the order of `state_shapes`."""
        return ()

    @property
    def shared_modules(self) -> tuple[str, str] | None:
        """Return the embedding and the output matrix, which draft heads share, or None."""
        return None

    @property
    def supports_mtp(self) -> bool:
        """Whether the checkpoint's multi-token prediction layer can draft for the model."""
        return True

    @property
    def n_at_once(self) -> int:
        """Number of consecutive tokens that a pass predicts."""
        return 1

    @abstractmethod
    def layer_prefix(self, i: int) -> str:
        """Return the checkpoint prefix of layer i's tensors."""

    @abstractmethod
    def layer_tensors(self, i: int) -> tuple[TensorShape, ...]:
        """Return the tensors of layer i, without the prefix, in order of use."""

    @abstractmethod
    def non_layer_tensors(self) -> tuple[TensorShape, ...]:
        """Return the tensors outside the layers."""

    @abstractmethod
    def is_unused(self, name: str) -> bool:
        """Return whether a checkpoint tensor is not needed for computation."""

    @abstractmethod
    def row_inputs(
        self, positions: Tensor, lengths: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Return additional layer inputs per row, e.g. cosines and sines, shape (n, ...) each.

        positions  (n,) int64, on the host
        lengths    (n,) int64 sequence length at which plain decoding computes each row
        """

    @abstractmethod
    def embed(
        self, weights: LayerWeights, ids: Tensor, row_inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Embed tokens (n,); return hidden states (n, hidden_size) and layer inputs.

        row_inputs  result of the method `row_inputs`, on the device
        """

    @abstractmethod
    def layer(self, i: int, weights: LayerWeights, x: Tensor, context: PassContext) -> Tensor:
        """Apply layer i to hidden states x (n, hidden_size), which may be overwritten."""

    def layer_group(
        self, weights: Mapping[int, LayerWeights], x: Tensor, context: CachedContext
    ) -> Tensor:
        """Apply layers in order, `layer` with the weights of each."""
        for i, layer_weights in weights.items():
            x = self.layer(i, layer_weights, x, context)
        return x

    @abstractmethod
    def head(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Map final hidden states (n, hidden_size) to logits (n, vocab_size)."""

    def final_states(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Apply the norm behind the last layer to (n, hidden_size)."""
        raise NotImplementedError

    @abstractmethod
    def flops(self, i: int, n_rows: int, context: int) -> float:
        """Return the FLOPs of layer i on `n_rows` rows after `context` cached tokens."""

    def window(self, i: int) -> int | None:
        """Return the number of visible positions in layer i, including the row's; None for all."""
        return None

    def kv_nbytes(self, itemsize: int) -> int:
        """Return the cache bytes of a token over all layers."""
        return sum(shape.n_numbers for shape in self.kv_shapes) * itemsize

    @abstractmethod
    def scratch_nbytes(self, n_rows: int, n_logits: int, itemsize: int) -> int:
        """Return activation bytes for `n_rows` rows per layer call and `n_logits` logit rows."""

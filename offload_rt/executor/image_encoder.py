"""Image features of a pass, computed by the vision tower and kept for later rows."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.executor.step import Chunk
from offload_rt.models.image_prompt import ImageFeatures, PromptImage
from offload_rt.models.layers import LayerWeights
from offload_rt.offload.streamer import Streamer
from offload_rt.system.trace import COMPUTE, Trace
from offload_rt.weights.layout import Layout

if TYPE_CHECKING:  # loads the models of transformers
    from offload_rt.models.image_tower import ImageTower

# Features of this number of largest images are kept.
KEPT_IMAGES = 2


@dataclass(eq=False, repr=False)
class ImageEncoder:
    """Compute the features of images, and keep the most recent features.

    weights   of the tower outside its blocks
    blocks    streamer of the tower's blocks
    view      returns the weights of a block
    max_rows  image tokens to keep; an image in use may exceed them
    """

    tower: ImageTower
    weights: LayerWeights
    blocks: Streamer
    view: Callable[[Layout, Tensor], LayerWeights]
    device: torch.device
    max_rows: int
    trace: Trace
    _kept: OrderedDict[int, ImageFeatures] = field(default_factory=OrderedDict, init=False)

    def features(self, image: PromptImage) -> ImageFeatures:
        """Return the features of an image. Raises LinkError if a block fails to arrive."""
        features = self._kept.get(image.key)
        if features is None:
            inputs = {**image.inputs, **image.pixels()}
            tensors = ops.to_device(list(inputs.values()), self.device)
            inputs = dict(zip(inputs, tensors, strict=True))
            with self.trace.span(COMPUTE, "image"), closing(self.blocks.sweep()) as sweep:
                blocks = (self.view(block.layout, block.data) for block in sweep)
                features = self.tower.features(self.weights, blocks, inputs)
                deque(blocks, maxlen=0)  # release the last block
            assert len(features.rows) == len(image.rows), "a row per image token"
        kept = self._kept
        kept[image.key] = features
        kept.move_to_end(image.key)
        while len(kept) > 1 and sum(len(part.rows) for part in kept.values()) > self.max_rows:
            kept.popitem(last=False)
        return features

    def with_images(self, chunk: Chunk) -> Chunk:
        """Add the image tokens of a chunk to it."""
        segments = chunk.segments
        parts = [part for segment in segments for part in segment.image_rows(self.tower.token_id)]
        if all(part.image is None for part in parts):
            return chunk
        is_apart = self.tower.is_causal_without_window
        causal = tuple(segment.mask(is_causal=True) for segment in segments if is_apart)
        return replace(chunk, images=tuple(parts), causal=causal)

    def embed(
        self, non_layer: LayerWeights, ids: Tensor, chunk: Chunk
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Embed tokens (n,) of a chunk with images; see `Architecture.embed`."""
        parts = [
            self.features(image).part(rows) if image else self.tower.plain(non_layer, self.device)
            for image, rows in chunk.images
        ]
        return self.tower.embed(non_layer, ids, chunk.row_inputs[0], ImageFeatures.cat(parts))

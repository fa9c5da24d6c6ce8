"""Image features of a pass, computed by the vision tower and kept for later rows."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from offload_rt import ops
from offload_rt.models.architecture import LayerWeights
from offload_rt.models.image_prompt import PromptImage
from offload_rt.models.image_tower import ImageFeatures, ImageTower
from offload_rt.system.trace import COMPUTE, Trace

# Features of this number of largest images are kept.
KEPT_IMAGES = 2


class ImageRows(NamedTuple):
    """Image tokens in a chunk.

    image  None for a generated placeholder token, which is no part of an image
    rows   the image's tokens in the chunk
    """

    image: PromptImage | None
    rows: slice


class ImageEncoder:
    """Compute the features of images, and keep the most recent features.

    max_rows  image tokens to keep; an image in use may exceed them
    """

    def __init__(
        self,
        tower: ImageTower,
        weights: LayerWeights,
        device: torch.device,
        max_rows: int,
        trace: Trace,
    ) -> None:
        self.tower = tower
        self._weights = weights
        self._device = device
        self._max_rows = max_rows
        self._trace = trace
        self._kept: OrderedDict[int, ImageFeatures] = OrderedDict()

    def features(self, image: PromptImage) -> ImageFeatures:
        """Return the features of an image."""
        features = self._kept.get(image.key)
        if features is None:
            inputs = {**image.inputs, **image.pixels()}
            tensors = ops.to_device(list(inputs.values()), self._device)
            with self._trace.span(COMPUTE, "image"):
                features = self.tower.features(
                    self._weights, dict(zip(inputs, tensors, strict=True))
                )
            assert len(features.rows) == len(image.rows), "a row per image token"
        self._kept[image.key] = features
        self._kept.move_to_end(image.key)
        while (
            len(self._kept) > 1
            and sum(len(kept.rows) for kept in self._kept.values()) > self._max_rows
        ):
            self._kept.popitem(last=False)
        return features

    def rows(self, parts: Sequence[ImageRows], non_layer: LayerWeights) -> ImageFeatures:
        """Return the features of the image tokens of a chunk, in order."""
        return ImageFeatures.cat(
            [
                self.tower.plain(non_layer, self._device)
                if part.image is None
                else self.features(part.image).part(part.rows)
                for part in parts
            ]
        )

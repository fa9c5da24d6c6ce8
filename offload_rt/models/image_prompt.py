"""Prompts with images: token ids, pixel values, positions."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from offload_rt.errors import PromptError

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from offload_rt.models.image_tower import ImageTower
    from offload_rt.models.processors import ProcessedImage

# Qwen-VL's limit. Processors that scale the shorter side up would fill the memory with a strip.
_MAX_RATIO = 200


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt.

    key     negative number derived from the content; equal for equal images only
    rows    (n,) int64 indices of its tokens in the prompt, ascending
    inputs  small arguments of the vision tower, e.g. the grid
    pixels  computes further arguments of the tower, which need more memory than the image
    """

    key: int
    rows: np.ndarray
    inputs: Mapping[str, Tensor]
    pixels: Callable[[], Mapping[str, Tensor]]


def image_key(size: Sequence[int], content: bytes) -> int:
    """Return the key of an image from its size and pixels."""
    digest = hashlib.sha256(repr(tuple(size)).encode() + content).digest()
    return -1 - int.from_bytes(digest[:7])


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Token ids of a prompt, with a placeholder per image token, and its images in order.

    positions  (3, n) int64 multimodal positions; None for 0 to n - 1
    blocks     (first, stop) of tokens that see each other; empty for causal attention
    """

    ids: list[int]
    images: tuple[PromptImage, ...]
    positions: Tensor | None = None
    blocks: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @cached_property
    def keyed_ids(self) -> list[int]:
        """Token ids with the key of the image in place of placeholders, to compare prompts."""
        ids = np.array(self.ids)
        for image in self.images:
            ids[image.rows] = image.key
        keyed: list[int] = ids.tolist()
        return keyed

    def whole_blocks(self, first: int, n: int) -> int:
        """Return at most n tokens from index `first` that end at no token inside a block.

        More than n if they start inside a block, or with a block of more tokens.
        """
        for start, stop in self.blocks:
            if start < first + n < stop:
                return stop - first if start <= first else start - first
        return n

    def positions_at(self, indices: Tensor) -> Tensor:
        """Return the positions, (n,) or (3, n), of tokens by index in the sequence."""
        if self.positions is None:
            return indices
        shift = int(self.positions.max()) + 1 - len(self.ids)
        within = indices.clamp(max=len(self.ids) - 1)
        return torch.where(indices < len(self.ids), self.positions[:, within], indices + shift)

    def rows(self, first: int, stop: int) -> list[tuple[PromptImage, slice]]:
        """Return the images with tokens at indices [first, stop), and these rows of each."""
        bounds = [(image, np.searchsorted(image.rows, (first, stop))) for image in self.images]
        return [(image, slice(*map(int, bound))) for image, bound in bounds if bound[0] < bound[1]]


class ImageProcessor:
    """Processor of a checkpoint with images.

    max_pixels  larger images are scaled down
    """

    def __init__(self, processor: Any, tower: ImageTower, max_pixels: int) -> None:
        self._processor = processor
        self._tower = tower
        self._max_pixels = max_pixels

    @classmethod
    def load(
        cls, path: Path, tokenizer: PreTrainedTokenizerBase, tower: ImageTower, max_pixels: int
    ) -> Self:
        """Load the processor of a checkpoint directory. Raises CheckpointError."""
        from offload_rt.models.processors import load_processor

        return cls(load_processor(path, tokenizer, tower.family), tower, max_pixels)

    def encode(self, text: str, images: Sequence[Image]) -> ImagePrompt:
        """Encode a text with a placeholder per image of `scaled`. Raises PromptError."""
        try:
            out = self._processor(text=[text], images=images)
        except Exception as error:  # processors raise any class
            raise _failed(error) from error
        return self._prompt(out)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Sequence[Image],
        options: Mapping[str, Any],
    ) -> ImagePrompt:
        """Encode a conversation; its parts {"type": "image"} correspond to the images, in order.

        images   of `scaled`
        options  arguments of `apply_chat_template` and template variables
        Raises PromptError.
        """
        template = options.get("chat_template") or self._processor.tokenizer.chat_template
        encoding = {
            "chat_template": template or self._processor.chat_template,
            "tokenize": True, "return_dict": True, "sanitize_control_tokens": True,
            "processor_kwargs": {"images": images},
        }  # fmt: skip
        turns = [dict(message) for message in messages]
        try:
            out = self._processor.apply_chat_template(turns, **{**options, **encoding})
        except Exception as error:  # templates and processors raise any class
            raise _failed(error) from error
        return self._prompt(out)

    def _prompt(self, out: Mapping[str, Any]) -> ImagePrompt:
        """Divide the placeholders of a prompt between its images."""
        ids = list(out["input_ids"][0])
        rows = np.flatnonzero(np.array(ids) == self._tower.token_id)
        place = self._processor.tokenizer.convert_ids_to_tokens(self._tower.token_id)
        parts = []
        first = 0
        for processed in out["processed_images"]:
            stop = first + processed.text.count(place)
            parts.append(self._image(rows[first:stop], processed))
            first = stop
        assert first == len(rows), "an image has as many tokens alone as in its prompt"
        return self._tower.prompt(ids, tuple(parts))

    def _image(self, rows: np.ndarray, processed: ProcessedImage) -> PromptImage:
        key = image_key(processed.image.size, processed.image.tobytes())
        small = {
            name: value for name, value in processed.small.items() if name in self._tower.inputs
        }
        return PromptImage(key, rows, small, processed.pixels)

    def scaled(self, image: Image) -> Image:
        """Scale an image down to the largest permitted number of pixels.

        Raises PromptError for a strip.
        """
        if max(image.size) > _MAX_RATIO * min(image.size):
            need = f"sides that differ by a factor of at most {_MAX_RATIO}"
            have = f"{image.width} x {image.height} pixels"
            raise PromptError("an image", need=need, have=have, change="crop it")
        scale = math.sqrt(self._max_pixels / (image.width * image.height))
        if scale < 1:
            image = image.resize((int(image.width * scale) or 1, int(image.height * scale) or 1))
        return image


def _failed(error: Exception) -> PromptError:
    said = " ".join(str(error).split())[:200] or type(error).__name__
    return PromptError(
        f"the model's processor failed: {said}", change="check the images and their placeholders"
    )

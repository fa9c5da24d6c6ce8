"""Prompts with images: token ids, pixel values, positions."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


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


class ImageRows(NamedTuple):
    """Image tokens in a chunk.

    image  None for a generated placeholder token, which is no part of an image
    rows   the image's tokens in the chunk
    """

    image: PromptImage | None
    rows: slice


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


# Token ids of a prompt, or a prompt with images.
EncodedPrompt = list[int] | ImagePrompt


def token_ids(prompt: EncodedPrompt) -> list[int]:
    """Return the token ids of a prompt."""
    return prompt.ids if isinstance(prompt, ImagePrompt) else prompt


class ImageFeatures(NamedTuple):
    """Output of the tower for image tokens.

    rows  (n, hidden_size)
    deep  further features (n, hidden_size) each, added to the outputs of the first layers
    """

    rows: Tensor
    deep: tuple[Tensor, ...] = ()

    def part(self, rows: Any) -> "ImageFeatures":
        """Return the features of some rows."""
        return ImageFeatures(self.rows[rows], tuple(layer[rows] for layer in self.deep))

    @classmethod
    def cat(cls, parts: Sequence["ImageFeatures"]) -> "ImageFeatures":
        """Concatenate features."""
        deep = zip(*(part.deep for part in parts), strict=True)
        return cls(torch.cat([part.rows for part in parts]), tuple(map(torch.cat, deep)))

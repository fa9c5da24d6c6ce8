"""Prompts with images: token ids, pixel values, positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image
    from torch import Tensor

    from offload_rt.text.detokenize import Message


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image of a prompt.

    key     negative number derived from the content; equal for equal inputs only
    rows    indices of its tokens in the prompt, ascending
    inputs  arguments of the vision tower, e.g. pixel values and grid
    """

    key: int
    rows: range | Sequence[int]
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Token ids of a prompt, with a placeholder per image token, and its images in order.

    positions  (3, n) int64 multimodal positions; None for 0 to n - 1
    """

    ids: list[int]
    images: tuple[PromptImage, ...]
    positions: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)


class ImageProcessor:
    """Processor of a checkpoint with images."""

    @classmethod
    def load(cls, directory: Path, max_pixels: int) -> Self | None:
        """Load the processor of a checkpoint; None for checkpoints without images.

        max_pixels  larger images are scaled down
        Raises UnsupportedModelError.
        """
        return None

    def encode(self, text: str, images: Sequence[Image]) -> ImagePrompt:
        """Encode a text with a placeholder per image. Raises PromptError."""
        raise NotImplementedError

    def encode_chat(
        self, messages: Sequence[Message], images: Sequence[Image], options: Mapping[str, Any]
    ) -> ImagePrompt:
        """Encode a conversation; its parts {"type": "image"} correspond to the images, in order.

        options  arguments of `apply_chat_template` and template variables
        Raises PromptError.
        """
        raise NotImplementedError

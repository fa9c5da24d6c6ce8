"""Multimodal processor of a checkpoint, without parts for video and audio."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offload_rt.errors import CheckpointError, PromptError
from offload_rt.models.image_prompt import ImagePrompt, PromptImage, image_key

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

    from offload_rt.models.image_tower import ImageTower

# Qwen-VL's limit. Processors that scale the shorter side up would fill the memory with a strip.
_MAX_RATIO = 200


class ProcessedImage(NamedTuple):
    """An image of a prompt.

    image    as passed to the processor
    text     replaces the image's placeholder in the prompt
    small    outputs of the image processor without pixels
    pixels   computes outputs with a value per pixel
    """

    image: Image
    text: str
    small: Mapping[str, Any]
    pixels: Callable[[], Mapping[str, Any]]


class ImageProcessor:
    """Processor of a checkpoint with images.

    max_pixels  larger images are scaled down
    """

    def __init__(self, processor: Any, tower: ImageTower, max_pixels: int) -> None:
        self._processor = processor
        self._tower = tower
        self._max_pixels = max_pixels

    def encode(self, text: str, images: Sequence[Image]) -> ImagePrompt:
        """Encode a text with a placeholder per image of `scaled`. Raises PromptError."""
        with _processing():
            out = self._processor(text=[text], images=images)
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
        with _processing():
            out = self._processor.apply_chat_template(turns, **{**options, **encoding})
        return self._prompt(out)

    def _prompt(self, out: Mapping[str, Any]) -> ImagePrompt:
        """Divide the placeholders of a prompt between its images."""
        ids = list(out["input_ids"][0])
        rows = np.flatnonzero(np.array(ids) == self._tower.token_id)
        place = self._processor.tokenizer.convert_ids_to_tokens(self._tower.token_id)
        images = []
        first = 0
        for processed in out["processed_images"]:
            key = image_key(processed.image.size, processed.image.tobytes())
            stop = first + processed.text.count(place)
            inputs = self._tower.inputs
            small = {name: value for name, value in processed.small.items() if name in inputs}
            images.append(PromptImage(key, rows[first:stop], small, processed.pixels))
            first = stop
        assert first == len(rows), "an image has as many tokens alone as in its prompt"
        return self._tower.prompt(ids, tuple(images))

    def scaled(self, image: Image) -> Image:
        """Scale an image down to the permitted number of pixels. Raises PromptError for a strip."""
        if max(image.size) > _MAX_RATIO * min(image.size):
            need = f"sides that differ by a factor of at most {_MAX_RATIO}"
            have = f"{image.width} x {image.height} pixels"
            raise PromptError("an image", need=need, have=have, change="crop it")
        scale = math.sqrt(self._max_pixels / (image.width * image.height))
        if scale < 1:
            image = image.resize((int(image.width * scale) or 1, int(image.height * scale) or 1))
        return image


@contextmanager
def _processing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # templates and processors raise any class
        problem = f"the model's processor failed: {_said(error) or type(error).__name__}"
        raise PromptError(problem, change="check the images and their placeholders") from error


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def load_processor(path: Path, tokenizer: PreTrainedTokenizerBase, kind: str) -> Any:
    """Return transformers' processor of a checkpoint directory, with the given tokenizer.

    `AutoProcessor` would also load the video processor, which requires torchvision.
    The processor returns "processed_images", a `ProcessedImage` each, in place of pixels.
    Raises CheckpointError.
    """
    import transformers
    from transformers.models.auto import processing_auto

    settings = _read(path / "processor_config.json")
    # Checkpoints of older versions name the class only here.
    name = settings.get("processor_class") or vars(processing_auto)["PROCESSOR_MAPPING_NAMES"][kind]
    known = {
        key: value
        for key, value in settings.items()
        if not key.endswith("_processor") and key not in ("processor_class", "auto_map")
    }
    template = tokenizer.chat_template or _read(path / "chat_template.json").get("chat_template")
    known.setdefault("chat_template", template)
    try:
        loader: Any = transformers.AutoImageProcessor  # untyped
        images = loader.from_pretrained(path, local_files_only=True)
        made = _image_by_image(getattr(transformers, name))
        return made(image_processor=images, tokenizer=tokenizer, **known)
    except Exception as error:  # transformers raises any class
        problem = f"the image processor in {path} cannot be loaded: {_said(error)}"
        change = "download it again, or set --max-image-pixels=0"
        raise CheckpointError(problem, change=change) from error


def _image_by_image(made: Any) -> Any:
    """Return a subclass that processes each image alone, and does not check absent parts."""
    from transformers import ProcessorMixin
    from transformers.image_utils import make_flat_list_of_images

    class Processor(made):  # type: ignore[misc]  # chosen at run time
        # Classes with a `__call__` of their own rearrange the pixels of all images.
        __call__ = ProcessorMixin.__call__

        def _process_images(
            self, images: Any, **kwargs: Any
        ) -> tuple[dict[str, list[ProcessedImage]], list[str]]:
            kwargs["return_tensors"] = "pt"
            parts = []
            flat: Any = make_flat_list_of_images(images)
            for image in flat:
                process = partial(super()._process_images, [image], **kwargs)
                outputs, (text,) = process()
                small = {name: outputs[name] for name in outputs if not name.startswith("pixel")}
                # Qwen's pixels need eight times the memory of the image: compute them again later.
                parts.append(ProcessedImage(image, text, small, partial(_pixels, process)))
            return {"processed_images": parts}, [part.text for part in parts]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)

    return Processor


def _pixels(process: Callable[[], tuple[Mapping[str, Any], list[str]]]) -> dict[str, Any]:
    outputs, _ = process()
    return {name: outputs[name] for name in outputs if name.startswith("pixel")}


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content

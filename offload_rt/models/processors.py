"""Load the multimodal processor of a checkpoint, without parts for video and audio."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.errors import CheckpointError

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

_CONFIG = "processor_config.json"
_TEMPLATE = "chat_template.json"


@dataclass(frozen=True)
class ProcessedImage:
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


def load_processor(path: Path, tokenizer: PreTrainedTokenizerBase, kind: str) -> Any:
    """Return transformers' processor of a checkpoint directory, with the given tokenizer.

    `AutoProcessor` would also load the video processor, which requires torchvision.
    The processor returns "processed_images", a `ProcessedImage` each, in place of pixels.
    Raises CheckpointError.
    """
    import transformers
    from transformers.models.auto import processing_auto

    settings = _read(path / _CONFIG)
    # Checkpoints of older versions name the class only here.
    name = settings.get("processor_class") or vars(processing_auto)["PROCESSOR_MAPPING_NAMES"][kind]
    known = {
        key: value
        for key, value in settings.items()
        if not key.endswith("_processor") and key not in ("processor_class", "auto_map")
    }
    template = tokenizer.chat_template or _read(path / _TEMPLATE).get("chat_template")
    known.setdefault("chat_template", template)
    try:
        loader: Any = transformers.AutoImageProcessor  # untyped
        images = loader.from_pretrained(path, local_files_only=True)
        made = _image_by_image(getattr(transformers, name))
        return made(image_processor=images, tokenizer=tokenizer, **known)
    except Exception as error:  # transformers raises any class
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the image processor in {path} cannot be loaded: {said}",
            change="download it again, or set --max-image-pixels=0",
        ) from error


def _image_by_image(made: Any) -> Any:
    """Return a subclass that processes each image alone, and does not check absent parts.

    The classes of absent parts require torchvision.
    """
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
                small = {name: outputs[name] for name in outputs if not _has_pixels(name)}
                # Qwen's pixels need eight times the memory of the image: compute them again later.
                parts.append(ProcessedImage(image, text, small, partial(_pixels, process)))
            return {"processed_images": parts}, [part.text for part in parts]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)

    return Processor


def _pixels(process: Callable[[], tuple[Mapping[str, Any], list[str]]]) -> dict[str, Any]:
    outputs, _ = process()
    return {name: outputs[name] for name in outputs if _has_pixels(name)}


def _has_pixels(name: str) -> bool:
    return name.startswith("pixel")


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content

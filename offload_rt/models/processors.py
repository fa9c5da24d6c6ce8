"""Load the multimodal processor of a checkpoint, without parts for video and audio."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload_rt.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIG = "processor_config.json"
_TEMPLATE = "chat_template.json"


def load_processor(path: Path, tokenizer: PreTrainedTokenizerBase, kind: str) -> Any:
    """Return transformers' processor of a checkpoint directory, with the given tokenizer.

    `AutoProcessor` would also load the video processor, which requires torchvision.
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
        made = _without_absent_parts(getattr(transformers, name))
        return made(image_processor=images, tokenizer=tokenizer, **known)
    except Exception as error:  # transformers raises any class
        said = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"the image processor in {path} cannot be loaded: {said}",
            change="download it again, or set --max-image-pixels=0",
        ) from error


def _without_absent_parts(made: Any) -> Any:
    """Return a subclass that does not check absent parts: their classes require torchvision."""

    class Processor(made):  # type: ignore[misc]  # chosen at run time
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is not None:
                return super().check_argument_for_proper_class(argument_name, argument)

    return Processor


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content

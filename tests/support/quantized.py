"""Checkpoints, configs and names of quantised formats."""

import shutil
from pathlib import Path
from typing import Any

from quantize import Choice
from safetensors.torch import save_file
from torch import Tensor

from support.heads import edit_config


def id_of(choice: object) -> str | None:
    if not isinstance(choice, Choice):
        return None
    flags = ("-sym" if choice.symmetric else "") + ("-act" if choice.desc_act else "")
    return f"{choice.format}-{choice.bits}-{choice.group_size}{flags}"


def rewrite(source: Path, target: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    """Copy a checkpoint with other tensors and changes of its config."""
    shutil.copytree(source, target)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    edit_config(target, **changes)
    return target


MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
}

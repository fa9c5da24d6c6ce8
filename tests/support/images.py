"""Tiny random models with vision towers, prompts with images, and their greedy texts."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Gemma4VisionConfig, PreTrainedModel

from bench.models.tiny import SIZES, _small, config_of, random_model
from offload_rt.models.image_prompt import ImagePrompt, PromptImage, image_key
from offload_rt.models.image_tower import ImageTower
from support.tiny import prompt_of

IMAGE_ID = 150
# Sizes of the tower and the projector; those of the whole model are separate.
_TOWER: dict[str, Any] = {"image_size": 32, "patch_size": 8, "out_hidden_size": 64, "depth": 4}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"deepstack_visual_indexes": [0, 2]},
    "gemma3": {"mm_tokens_per_image": 4},
    "llava_next": {"image_grid_pinpoints": [[32, 64], [64, 32]]},
    "internvl": {"image_size": [32, 32], "patch_size": [8, 8]},
}  # fmt: skip
_GRIDS = {
    "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v",
    "qwen3_5_moe", "glm4v_moe",
}  # fmt: skip


def image_model(kind: str, folder: Path) -> PreTrainedModel:
    """Save a tiny random model with a vision tower; return the model of transformers."""
    config = config_of(kind)
    if config.vision_config is None:
        config.vision_config = _small(Gemma4VisionConfig(), SIZES, ())
    tower = config.vision_config
    more = _OF_TYPE.get(kind, {})
    for name, value in (_TOWER | more).items():
        for part in (tower, config):
            if hasattr(part, name) or name in more:
                setattr(part, name, value)
    if kind == "gemma4":  # larger models of the family
        config.text_config.use_bidirectional_attention = "vision"
    if kind == "glm4v_moe":
        config.text_config.rope_parameters["mrope_section"] = [1, 1, 2]
    config.image_token_id = IMAGE_ID
    model = random_model(type(config).from_dict(config.to_dict()), has_tower=True)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return model


def image_inputs(kind: str, seed: int) -> dict[str, Tensor]:
    """Return random inputs of a tower for an image."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator)
    if kind in _GRIDS:
        return {
            "pixel_values": draw(24, 3 * 2 * 8 * 8),
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
        }
    if kind == "gemma4":
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6))[None]
        pixels = torch.rand(1, 36, 3 * 8 * 8, generator=generator)
        return {"pixel_values": pixels, "image_position_ids": places}
    if kind == "llava_next":
        return {"pixel_values": draw(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[40, 20]])}
    pixels = draw(1, 3, 32, 32)
    if kind == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[32, 32]])}
    return {"pixel_values": pixels[None] if kind == "smolvlm" else pixels}


def image_prompt(
    model: PreTrainedModel, tower: ImageTower, parts: Sequence[int | dict[str, Tensor]]
) -> ImagePrompt:
    """Return a prompt of texts, each a number of tokens, and images."""
    ids: list[int] = []
    images = []
    for n, part in enumerate(parts):
        if isinstance(part, int):
            ids += prompt_of(n, part, 140)
            continue
        with torch.no_grad():
            features = model.base_model.get_image_features(**part).pooler_output
        tiles = [features] if isinstance(features, Tensor) else features
        n_rows = sum(tile.flatten(0, -2).shape[0] for tile in tiles)
        rows = torch.arange(len(ids), len(ids) + n_rows).numpy()
        small = dict(part)
        pixels = {"pixel_values": small.pop("pixel_values")}
        key = image_key((n_rows,), pixels["pixel_values"].numpy().tobytes())
        images.append(PromptImage(key, rows, small, lambda pixels=pixels: pixels))
        ids += [IMAGE_ID] * n_rows
    return tower.prompt(ids, tuple(images))


def generate_images(model: PreTrainedModel, prompt: ImagePrompt, n_new: int) -> list[int]:
    """The greedy continuation of a prompt with images by transformers."""
    lengths = {"max_new_tokens": n_new, "min_new_tokens": n_new}
    out = model.generate(**_inputs(model, prompt), **lengths, do_sample=False, pad_token_id=0)
    return out[0, len(prompt.ids) :].tolist()


@torch.no_grad()
def image_logits(model: PreTrainedModel, prompt: ImagePrompt) -> Tensor:
    """(n, vocabulary) of a prompt with images by transformers."""
    return model(**_inputs(model, prompt), use_cache=False).logits[0]


def _inputs(model: PreTrainedModel, prompt: ImagePrompt) -> dict[str, Tensor]:
    ids = torch.tensor([prompt.ids])
    kind = model.config.model_type
    dim = int(kind == "smolvlm")
    parts = [{**image.inputs, **image.pixels()} for image in prompt.images]
    inputs = {name: torch.cat([part[name] for part in parts], dim) for name in parts[0]}
    if kind in _GRIDS | {"gemma3", "gemma4"}:
        name = "token_type_ids" if kind == "gemma3" else "mm_token_type_ids"
        inputs[name] = (ids == IMAGE_ID).int()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **inputs}

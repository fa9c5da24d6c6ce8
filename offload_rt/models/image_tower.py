"""Vision tower of a transformers model: image features, embeddings of rows, positions."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from offload_rt.models.bound_modules import BoundModules, BoundPart
from offload_rt.models.image_prompt import ImageFeatures, ImagePrompt, PromptImage
from offload_rt.models.layers import LayerWeights, TensorShape
from offload_rt.models.stand_ins import Call
from offload_rt.models.traced import ImageInputs, TracedModel

# Model types whose output equals `generate` of transformers in tests.
FAMILIES = (
    "aya_vision", "gemma3", "gemma4", "glm46v", "glm4v", "glm4v_moe", "internvl", "llava",
    "llava_next", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl",
    "smolvlm",
)  # fmt: skip
# Model types whose towers mask patches by patches. Their patches increase with the pixels, as do
# those of models with multimodal positions. Other models use tiles of fixed size.
_MASKED = ("mistral3", "gemma4")
_MOST_TILES = {"llava_next": 5, "internvl": 13, "aya_vision": 13, "idefics3": 17, "smolvlm": 17}


class ImageTower:
    """Modules of a model that map pixels to embeddings.

    family    model type
    token_id  placeholder of image tokens
    inputs    names of the processor's outputs that the tower reads
    is_causal_without_window  only layers with a window let the tokens of an image see each other
    """

    def __init__(self, model: TracedModel, family: str) -> None:
        self.family = family
        self._model = model
        self._base: Any = model.model.base_model
        self._config: Any = model.model.config
        among = getattr(model.text, "use_bidirectional_attention", None)
        self.is_causal_without_window = family == "gemma4"
        self._is_bidirectional = family == "gemma3" or among == "vision"
        token_id: int | None = getattr(self._config, "image_token_id", None)
        self.token_id: int = token_id or self._config.image_token_index
        self._features = self._base.get_image_features
        self.inputs = tuple(inspect.signature(inspect.unwrap(self._features)).parameters)
        self._blocks: Iterator[LayerWeights] = iter(())
        self._is_list = True
        self._n_deep = 0
        text = {id(module) for module in model.decoder.modules()}
        modules = {
            f"{model.model.base_model_prefix}.{name}".rstrip("."): module
            for name, module in self._base.named_modules()
            if id(module) not in text and "audio" not in name
        }
        lists = [module for module in modules.values() if isinstance(module, nn.ModuleList)]
        blocks = max(lists, key=len, default=nn.ModuleList())
        self._bound = BoundModules(model.model.dtype)
        self._parts = [BoundPart() for _ in range(1 + len(blocks))]
        pairs = list(zip(self._parts[1:], blocks, strict=True))
        owners = {id(module): part for part, block in pairs for module in block.modules()}
        for name, module in modules.items():
            if isinstance(module, PreTrainedModel) and module is not self._base:
                module.config._attn_implementation = "sdpa" if module._supports_sdpa else "eager"
            self._bound.add(owners.get(id(module), self._parts[0]), module, name)
        for part, block in pairs:
            block.forward = partial(self._block, part, block.forward)

    @property
    def parts(self) -> list[tuple[TensorShape, ...]]:
        """Tensors outside the blocks, then the tensors of each block, in order of use."""
        return [tuple(TensorShape(*item) for item in part.shapes.items()) for part in self._parts]

    def _block(self, part: BoundPart, forward: Any, *args: Any, **kwargs: Any) -> Any:
        with self._bound.bound(part, next(self._blocks)):
            return forward(*args, **kwargs)

    def features(
        self, weights: LayerWeights, blocks: Iterator[LayerWeights], inputs: Mapping[str, Tensor]
    ) -> ImageFeatures:
        """Compute the features of an image.

        weights  outside the blocks
        blocks   weights of each block, in order; weights expire at the next step
        inputs   on the device
        """
        self._blocks = blocks
        cast = {
            name: value.to(weights.dtype) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        self._model.move_to(inputs["pixel_values"].device)
        with self._bound.bound(self._parts[0], weights):
            out = self._features(**cast, return_dict=True)
        rows = out.pooler_output
        self._is_list = not isinstance(rows, Tensor)
        deep = getattr(out, "deepstack_features", None) or ()
        self._n_deep = len(deep)
        return ImageFeatures(_flat(rows), tuple(map(_flat, deep)))

    def embed(
        self, weights: LayerWeights, ids: Tensor, positions: Tensor, features: ImageFeatures
    ) -> tuple[Tensor, tuple[Call, ...]]:
        """`TracedModel.embed` for rows with images.

        ids        (n,) with `token_id` for image tokens
        positions  (n,) or (3, n)
        features   of the image tokens, in order
        """
        out: Any = BaseModelOutputWithPooling()
        out.pooler_output = [features.rows] if self._is_list else features.rows[:, None]
        out.deepstack_features = [[layer] for layer in features.deep]
        self._base.get_image_features = lambda *_, **__: out
        images = ImageInputs(self._base, {"pixel_values": features.rows}, bool(features.deep))
        return self._model.embed(weights, ids, positions, images)

    def _most_patches(self, n_pixels: int) -> int:
        """Return the patches of an image of `n_pixels` pixels, at most."""
        vision = self._config.vision_config
        n_per_patch = _area(vision.patch_size)
        side: Any = getattr(vision, "image_size", None)
        if side is None or self.family in _MASKED or hasattr(self._base, "get_rope_index"):
            return -(-n_pixels // n_per_patch)
        n_in_tile = _area(side) // n_per_patch + 1
        return _MOST_TILES.get(self.family, 1) * n_in_tile

    def most_tokens(self, n_pixels: int) -> int:
        """Return the tokens of an image of `n_pixels` pixels, at most."""
        configs = (self._config.vision_config, self._config)
        merged = max(int(getattr(config, "spatial_merge_size", None) or 1) for config in configs)
        return -(-self._most_patches(n_pixels) // merged**2)

    def scratch_nbytes(self, n_pixels: int, n_kept: int, itemsize: int) -> int:
        """Return the bytes of activations for an image, and of the features of `n_kept` images."""
        shapes = (shape for part in self._parts for shape in part.shapes.values())
        widest = max(sum(shape) for shape in shapes if len(shape) == 2)
        # Of a layer: its input, norm, queries, keys, values and outputs, or two wide products.
        n_patches = self._most_patches(n_pixels)
        n_activations = n_patches * 4 * widest
        if self.family in _MASKED:
            n_activations += n_patches**2
        width: int = self._model.text.hidden_size
        n_features = n_kept * self.most_tokens(n_pixels) * width * (1 + 3)  # up to 3 deep ones
        # The processor's pixels are float32.
        return (n_activations + n_features + 3 * n_pixels) * itemsize + 4 * 3 * n_pixels

    def plain(self, weights: LayerWeights, device: torch.device) -> ImageFeatures:
        """Return the embedding of the placeholder as an ordinary token, as features of a row."""
        ids = torch.tensor([self.token_id], device=device)
        row = self._model.embed(weights, ids, torch.zeros_like(ids), None)[0]
        return ImageFeatures(row, (torch.zeros_like(row),) * self._n_deep)

    def prompt(self, ids: list[int], images: tuple[PromptImage, ...]) -> ImagePrompt:
        """Return the prompt of token ids with a placeholder per image token."""
        is_image = np.array(ids) == self.token_id
        edges = np.flatnonzero(np.diff(is_image, prepend=False, append=False)).reshape(-1, 2)
        blocks = [(first, stop) for first, stop in edges.tolist()] if self._is_bidirectional else []
        if not hasattr(self._base, "get_rope_index"):
            return ImagePrompt(ids, images, blocks=tuple(blocks))
        rows = torch.tensor([ids])
        grids = torch.cat([image.inputs["image_grid_thw"] for image in images])
        types = (rows == self.token_id).int()
        positions = self._base.get_rope_index(rows, types, image_grid_thw=grids)[0]
        return ImagePrompt(ids, images, positions[:, 0], tuple(blocks))


def _flat(rows: Any) -> Tensor:
    """Concatenate features to (n, hidden_size)."""
    if isinstance(rows, Tensor):
        return rows.flatten(0, -2)
    return torch.cat([_flat(part) for part in rows])


def _area(side: int | Sequence[int]) -> int:
    height, width = (side, side) if isinstance(side, int) else side
    return height * width

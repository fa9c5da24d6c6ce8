"""Layers for multi-token prediction of transformers' models, which transformers itself leaves out: Qwen3-Next, Qwen3.5."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from offload_rt.models.architecture import Architecture, LayerWeights, Part
from offload_rt.models.heads import MTP_LAYOUTS, Mtp, MtpLayout
from offload_rt.models.traced import TracedModel
from offload_rt.models.transformers import TransformersModel


@dataclass(frozen=True)
class TracedMtp(Mtp, TransformersModel):
    """The target's own model, of one layer with whole attention, whose last norm is the head's.

    layout  by the names of that model; in the checkpoint it is `stored`
    """

    stored: MtpLayout = MTP_LAYOUTS[0]

    def of_checkpoint(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Self, Mapping[str, Part]]:
        """Of all tensors the head's alone. See `Architecture.of_checkpoint`."""
        known = dict[str, str]()
        for theirs, own in zip(self.stored, self.layout, strict=True):
            if isinstance(theirs, str):
                known |= {f"{own}{name.removeprefix(theirs)}": name for name in shapes if name.startswith(theirs)}
        spec, parts = super().of_checkpoint({own: shapes[name] for own, name in known.items()})
        return spec, {name: part._replace(name=known[part.name]) for name, part in parts.items()}

    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        """By the model's own kind of norm."""
        return self.model.normed(weights.vector(name), x)


def traced_mtp(target: Architecture, layout: MtpLayout) -> TracedMtp:
    """The layer of a model for multi-token prediction."""
    assert isinstance(target, TransformersModel), "no other one has states"
    config = deepcopy(target.model.model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers, text.layer_types = 1, ["full_attention"]
    model = TracedModel(config, type(target.model.model))
    norm = next(name for name, one in model.model.named_modules() if one is model.decoder.norm)
    own = layout._replace(layer=f"{model.prefix}0.", norm=norm)
    changes = {
        "family": "mtp", "n_layers": 1, "taps": (target.n_layers,), "model": model, "experts": (), "joined": (), "layout": own,
        "target_norm": norm, "stored": layout, "n_kv_heads": model.kv_shapes[0].n_heads,
    }  # fmt: skip
    return TracedMtp(**{**vars(target), **changes})

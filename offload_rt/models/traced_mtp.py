"""Multi-token prediction layers that transformers omits: Qwen3-Next, Qwen3.5."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from offload_rt.models.architecture import Architecture
from offload_rt.models.heads import MTP_LAYOUTS, Mtp, MtpLayout
from offload_rt.models.layers import LayerWeights, Part
from offload_rt.models.traced import TracedModel
from offload_rt.models.transformers import TransformersModel


@dataclass(frozen=True)
class TracedMtp(Mtp, TransformersModel):
    """A model like the target with a single full-attention layer and the head's final norm.

    layout  module names in this model
    stored  module names in the checkpoint
    """

    stored: MtpLayout = MTP_LAYOUTS[0]

    def of_checkpoint(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Self, Mapping[str, Part]]:
        """Keep the head's tensors only. See `Architecture.of_checkpoint`."""
        known = dict[str, str]()
        for their_name, our_name in zip(self.stored, self.layout, strict=True):
            if isinstance(their_name, str):
                known |= {
                    f"{our_name}{name.removeprefix(their_name)}": name
                    for name in shapes
                    if name.startswith(their_name)
                }
        own_shapes = {our_name: shapes[name] for our_name, name in known.items()}
        spec, parts = super().of_checkpoint(own_shapes)
        return spec, {name: part._replace(name=known[part.name]) for name, part in parts.items()}

    def normed(self, weights: LayerWeights, name: str, x: Tensor) -> Tensor:
        return self.model.normed(weights.vector(name), x)


def traced_mtp(target: Architecture, layout: MtpLayout) -> TracedMtp:
    """Build the multi-token prediction layer of a target."""
    assert isinstance(target, TransformersModel), "only transformers models have recurrent states"
    config = deepcopy(target.model.model.config)
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 1
    text.layer_types = ["full_attention"]
    model = TracedModel(config, type(target.model.model))
    names = {module: name for name, module in model.model.named_modules()}
    norm = names[model.decoder.norm]
    changes = {
        "family": "mtp",
        "n_layers": 1,
        "taps": (target.n_layers,),
        "model": model,
        "parts": (),
        "layout": layout._replace(layer=f"{model.prefix}0.", norm=norm),
        "target_norm": norm,
        "stored": layout,
        "n_kv_heads": model.kv_shapes[0].n_heads,
    }
    return TracedMtp(**{**vars(target), **changes})

"""Part of a model on a rank: attributes shared with the complete model."""

from dataclasses import dataclass
from typing import Any

from offload_rt.models.architecture import Architecture


def of_whole(name: str) -> Any:
    """Delegate a method or, wrapped in `property`, an attribute to `self.whole`."""

    def delegate(self: Any, *args: Any) -> Any:
        attribute = getattr(self.whole, name)
        return attribute(*args) if callable(attribute) else attribute

    return delegate


@dataclass(frozen=True)
class ModelPart(Architecture):
    """Layers or shards of a model on one of several ranks.

    whole  complete model
    """

    whole: Architecture
    rank: int

    notice = property(of_whole("notice"))
    supports_heads = property(of_whole("supports_heads"))
    supports_mtp = property(of_whole("supports_mtp"))
    supports_self_draft = property(of_whole("supports_self_draft"))
    supports_far_kv = property(of_whole("supports_far_kv"))
    supports_training = property(of_whole("supports_training"))
    embeds_on_all_stages = property(of_whole("embeds_on_all_stages"))
    is_unused = of_whole("is_unused")
    row_inputs = of_whole("row_inputs")

"""Part of a model on a rank: attributes shared with the complete model."""

from dataclasses import dataclass, field
from typing import Any

from offload_rt.models.architecture import Architecture
from offload_rt.system.ranks import Ranks


def of_whole(name: str) -> Any:
    """Delegate a method or, wrapped in `property`, an attribute to `self.whole`."""

    def delegate(self: Any, *args: Any) -> Any:
        attribute = getattr(self.whole, name)
        return attribute(*args) if callable(attribute) else attribute

    return delegate


@dataclass(frozen=True)
class ModelPart(Architecture):
    """Layers or shards of a model on one of several ranks; `ranks` may be None, see `alone`."""

    whole: Architecture
    rank: int
    ranks: Ranks | None = field(compare=False, repr=False)

    def alone(self) -> "ModelPart":
        """Return the part as it is timed: with the exchanges that belong to a layer."""
        return self

    notice = property(of_whole("notice"))
    supports_mtp = property(of_whole("supports_mtp"))
    supports_self_draft = property(of_whole("supports_self_draft"))
    supports_offloaded_kv = property(of_whole("supports_offloaded_kv"))
    supports_training = property(of_whole("supports_training"))
    embeds_on_all_stages = property(of_whole("embeds_on_all_stages"))
    is_unused = of_whole("is_unused")
    row_inputs = of_whole("row_inputs")

"""Locate the tensors of a transformers model in a checkpoint by transformers' key mapping."""

from collections.abc import Iterable, Mapping

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)

from offload_rt.errors import UnsupportedModelError
from offload_rt.models.bound_modules import StoredParts
from offload_rt.models.layers import Part, TensorShape
from offload_rt.models.traced import TracedModel

# compressed-tensors stores each expert of Llama 4 as three modules.
_COMPRESSED = (
    WeightConverter(
        ["feed_forward.experts.*.gate_proj.weight", "feed_forward.experts.*.up_proj.weight"],
        "feed_forward.experts.gate_up_proj",
        [MergeModulelist(0), Concatenate(1)],
    ),
    WeightConverter(
        "feed_forward.experts.*.down_proj.weight",
        "feed_forward.experts.down_proj",
        [MergeModulelist(0)],
    ),
)
# Operations that join the matrices of experts.
_MERGES = ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])


class TensorNames:
    """Match a model's tensors with the tensors of a checkpoint.

    parts  locations by model tensor name; experts stored individually use checkpoint names;
           experts within a packed tensor of codes or scales use expert index and tensor kind
    Raises UnsupportedModelError if bytes would need rearranging.
    """

    def __init__(self, model: TracedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.parts: dict[str, Part] = {}
        self._model = model
        self._base = model.model.base_model_prefix
        transforms = [*get_model_conversion_mapping(model.model), *_COMPRESSED]
        self._renamings = [name for name in transforms if isinstance(name, WeightRenaming)]
        self._converters = [name for name in transforms if isinstance(name, WeightConverter)]
        self._of_experts: dict[str, dict[str, dict[str, None]]] = {}
        self._split: dict[str, dict[str, TensorShape]] = {}
        self._needed = set(model.shapes[-1])
        for i, names in enumerate(model.shapes[:-1]):
            self._needed |= {f"{model.prefix}{i}.{name}" for name in names}
        for stored in sorted(shapes, key=dot_natural_key):
            self._add(stored, shapes[stored])

    def _add(self, stored: str, shape: tuple[int, ...]) -> None:
        """Locate a tensor; unknown tensors keep their names."""
        stem, _, last = stored.rpartition(".")
        # codes and scales replace weights
        for probe, ending in ((stored, ""), (f"{stem}.weight", last)):
            name, pattern = self._renamed(probe)
            if name in self._model.state:
                if name not in self._needed:  # no conversion required
                    self.parts[name] = Part(stored)
                elif pattern is None:
                    self.parts[_ended(name, ending)] = Part(stored)
                else:
                    self._convert(stored, probe, ending, shape, name, pattern)
                return
        experts, _, part = stored.rpartition("_")  # packed codes or scales of all experts
        name = self._renamed(experts)[0]
        if name in self._model.state and shape[:1] == self._model.state[name][:1]:
            of_experts = self._of_experts.setdefault(name, {}).setdefault("", {})
            for i in range(shape[0]):
                self.parts[f"{name}.{i}.{part}"] = Part(stored, i, 1)
                of_experts[f"{name}.{i}"] = None
        else:
            self.parts[stored] = Part(stored)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        state = self._model.state
        new, pattern = rename_source_key(name, self._renamings, self._converters, self._base, state)
        return (name, None) if new not in state and name in state else (new, pattern)

    def _convert(
        self, stored: str, probe: str, ending: str, shape: tuple[int, ...], name: str, pattern: str
    ) -> None:
        """Locate a tensor that is split into, or concatenated from, model tensors."""
        converter = next(item for item in self._converters if pattern in item.source_patterns)
        steps = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
        own_name = apply_renamings(probe, self._renamings)
        base = f"{self._base}."
        if name.startswith(base) and not own_name.startswith(base):
            own_name = base + own_name
        if steps == [(Concatenate, 0)] and not ending:
            self.parts[own_name] = Part(stored)
            self._split.setdefault(name, {})[pattern] = TensorShape(own_name, shape)
        elif steps in _MERGES and probe.endswith(".weight"):
            self.parts[_ended(own_name, ending)] = Part(stored)
            experts = self._of_experts.setdefault(name, {}).setdefault(pattern, {})
            experts[own_name.removesuffix(".weight")] = None
        elif steps == [(Chunk, 0)] and not ending:
            targets = converter.target_patterns
            n_rows = shape[0] // len(targets)
            for n, target in enumerate(targets):
                self.parts[name.replace(targets[0], target)] = Part(stored, n * n_rows, n_rows)
        else:
            operations = ", ".join(map(str, converter.operations))
            problem = f"tensor {stored!r} requires conversion ({operations})"
            change = "save the model with the current version of transformers"
            raise UnsupportedModelError(problem, change=change)

    def stored_parts(self) -> tuple[StoredParts, ...]:
        """Return the tensors of each layer that are stored in parts."""
        layers = [StoredParts({}, {}) for _ in self._model.layers]
        for name, modules in self._of_experts.items():
            i, start = self._layer(name)
            kinds = (modules[pattern] for pattern in self._in_order(modules))
            layers[i].experts[name[start:]] = [
                [module[start:] for module in expert] for expert in zip(*kinds, strict=True)
            ]
        for name, tensors in self._split.items():
            i, start = self._layer(name)
            parts = (tensors[pattern] for pattern in self._in_order(tensors))
            layers[i].split[name[start:]] = [
                TensorShape(part.name[start:], part.shape) for part in parts
            ]
        return tuple(layers)

    def _layer(self, name: str) -> tuple[int, int]:
        """Return the layer index of a tensor, and the length of its prefix."""
        i = name.removeprefix(self._model.prefix).partition(".")[0]
        return int(i), len(f"{self._model.prefix}{i}.")

    def _in_order(self, patterns: Iterable[str]) -> list[str]:
        sources = [converter.source_patterns for converter in self._converters]
        order = {"": 0} | {source: n for names in sources for n, source in enumerate(names)}
        return sorted(patterns, key=order.__getitem__)


def _ended(name: str, ending: str) -> str:
    return name.removesuffix("weight") + ending if ending else name

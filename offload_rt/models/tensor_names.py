"""Where the tensors of a model of transformers lie in a checkpoint, by transformers' own mapping of names."""

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
from offload_rt.models.architecture import Part, TensorShape
from offload_rt.models.traced import ExpertNames, JoinedTensors, TracedModel


class TensorNames:
    """Finds a model's tensors among those of a checkpoint, of these shapes.

    parts  where the tensors lie, by the model's names; of experts that are stored one by one, by the checkpoint's; of one
           that is a part of codes or scales of all, by its number and what it is
    Raises UnsupportedModelError where bytes would have to change places.
    """

    def __init__(self, model: TracedModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.parts: dict[str, Part] = {}
        self._model, self._base = model, model.model.base_model_prefix
        transforms = get_model_conversion_mapping(model.model)
        self._renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        self._converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._of_experts: dict[str, dict[str, dict[str, None]]] = {}
        self._joined: dict[str, dict[str, TensorShape]] = {}
        of_layers = ({f"{model.prefix}{i}.{one}" for one in own} for i, own in enumerate(model.shapes[:-1]))
        self._needed = set(model.shapes[-1]).union(*of_layers)
        for stored in sorted(shapes, key=dot_natural_key):
            self._add(stored, shapes[stored])

    def _add(self, stored: str, shape: tuple[int, ...]) -> None:
        """Place a tensor; one that nothing is known of keeps its name."""
        stem, _, last = stored.rpartition(".")
        for probe, ending in ((stored, ""), (f"{stem}.weight", last)):  # a matrix may be stored as codes and scales
            name, pattern = self._renamed(probe)
            if name in self._model.state:
                if name not in self._needed:  # whatever would have to be done with it
                    self.parts[name] = Part(stored)
                elif pattern is None:
                    self.parts[_ended(name, ending)] = Part(stored)
                else:
                    self._convert(stored, probe, ending, shape, name, pattern)
                return
        experts, _, part = stored.rpartition("_")  # the codes or scales of all of them
        name = self._renamed(experts)[0]
        if name in self._model.state and shape[:1] == self._model.state[name][:1]:
            for i in range(shape[0]):
                self.parts[f"{name}.{i}.{part}"] = Part(stored, i, 1)
                self._of_experts.setdefault(name, {}).setdefault("", {})[f"{name}.{i}"] = None
        else:
            self.parts[stored] = Part(stored)

    def _renamed(self, name: str) -> tuple[str, str | None]:
        state = self._model.state
        new, pattern = rename_source_key(name, self._renamings, self._converters, self._base, state)
        return (name, None) if new not in state and name in state else (new, pattern)

    def _convert(self, stored: str, probe: str, ending: str, shape: tuple[int, ...], name: str, pattern: str) -> None:
        """Place a tensor that has parts of others, or is a part."""
        converter = next(one for one in self._converters if pattern in one.source_patterns)
        steps = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
        own, base = apply_renamings(probe, self._renamings), f"{self._base}."
        own = base + own if name.startswith(base) and not own.startswith(base) else own
        if steps == [(Concatenate, 0)] and not ending:
            self.parts[own] = Part(stored)
            self._joined.setdefault(name, {})[pattern] = TensorShape(own, shape)
        elif steps in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]) and probe.endswith(".weight"):
            self.parts[_ended(own, ending)] = Part(stored)
            self._of_experts.setdefault(name, {}).setdefault(pattern, {})[own.removesuffix(".weight")] = None
        elif steps == [(Chunk, 0)] and not ending:
            targets = converter.target_patterns
            n_rows = shape[0] // len(targets)
            for n, target in enumerate(targets):
                self.parts[name.replace(targets[0], target)] = Part(stored, n * n_rows, n_rows)
        else:
            raise UnsupportedModelError(
                f"tensor {stored!r} would have to be converted ({', '.join(map(str, converter.operations))})",
                change="save the model with transformers as its classes have it",
            )

    def experts(self) -> tuple[ExpertNames, ...]:
        """Of each layer."""
        layers: list[dict[str, list[list[str]]]] = [{} for _ in self._model.layers]
        for name, by_pattern in self._of_experts.items():
            i, start = self._layer(name)
            kinds = [[one[start:] for one in by_pattern[pattern]] for pattern in self._in_order(by_pattern)]
            layers[i][name[start:]] = [list(one) for one in zip(*kinds, strict=True)]
        return tuple(layers)

    def joined(self) -> tuple[JoinedTensors, ...]:
        """Of each layer."""
        layers: list[dict[str, tuple[TensorShape, ...]]] = [{} for _ in self._model.layers]
        for name, by_pattern in self._joined.items():
            i, start = self._layer(name)
            parts = (by_pattern[pattern] for pattern in self._in_order(by_pattern))
            layers[i][name[start:]] = tuple(TensorShape(one[start:], shape) for one, shape in parts)
        return tuple(layers)

    def _layer(self, name: str) -> tuple[int, int]:
        """Of a tensor the number of its layer, and where its name in there begins."""
        i = name.removeprefix(self._model.prefix).partition(".")[0]
        return int(i), len(f"{self._model.prefix}{i}.")

    def _in_order(self, patterns: Iterable[str]) -> list[str]:
        order = {"": 0} | {one: n for converter in self._converters for n, one in enumerate(converter.source_patterns)}
        return sorted(patterns, key=order.__getitem__)


def _ended(name: str, ending: str) -> str:
    """The name with another last part in place of "weight"; "": as it is."""
    return name.removesuffix("weight") + ending if ending else name

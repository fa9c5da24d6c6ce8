"""Learning the draft while the link is the limit: what the target says of accepted tokens distils low-rank changes of it.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177) by adapters (Hu et al. 2021, arXiv 2106.09685). Each passage is
predicted before it is learned from, so that it tells what was gained on text that has not been seen. While that is more than
chance, the sum of matrix and change takes the place of the matrix: drafts take as long as before.
"""

import math
import random
import time
from collections import deque
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from offload_rt import ops
from offload_rt.dtypes import DType
from offload_rt.executor.runner import Runner
from offload_rt.executor.sequence import Sequence
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.streamer import LayerView
from offload_rt.ops import reference
from offload_rt.sampling import TopTokens
from offload_rt.system.files import cache_directory, write_atomically
from offload_rt.weights.formats import dense

_RANK = 16
# Tokens of a passage that are learned from at least, some of which one pass may add, and those before that they look back on.
_N_LABELLED, _N_BEFORE = 32, 96
# How often a passage is learned from, each time in a step of its own, and of how many recent ones.
_N_USES, _N_RECENT = 16, 64
# Learning rate, and steps in which it rises to that.
_RATE, _WARM_UP = 2e-3, 20
# Passages by which it is judged whether there is a gain, at least and at most, and those without one after which it ends.
_LEAST_JUDGED, _MOST_JUDGED, _PATIENCE = 8, 32, 256
# Weight of the newest slice in the estimate of its seconds, and what is left of that at a layer where it was too long.
_NEWEST, _DOUBT = 0.25, 0.99


class Passage(NamedTuple):
    """Tokens (n,) int64, and what the target predicts after the last of them, (m, k) each."""

    tokens: Tensor
    labels: TopTokens


class Adapter:
    """A change b @ a of a matrix (n_out, n_in): one is trained, and an earlier one the matrix has been given in place."""

    def __init__(self, weight: Tensor, generator: torch.Generator) -> None:
        n_out, n_in = weight.shape
        a, b = torch.randn(_RANK, n_in, generator=generator) / math.sqrt(n_in), torch.zeros(n_out, _RANK)
        self._weight, self._original = weight, weight.to("cpu", copy=True)
        self.a, self.b = (one.to(weight.device).requires_grad_() for one in (a, b))
        self._given = self.a.detach().clone(), self.b.detach().clone()

    def __call__(self, x: Tensor, share: float) -> Tensor:
        """What x (n, n_in) times the original and a share of the change has beyond x times the matrix: (n, n_out) float32."""
        a, b = torch.cat((self.a, self._given[0])), torch.cat((share * self.b, -self._given[1]), dim=1)
        return F.linear(F.linear(x.float(), a), b)

    @torch.no_grad()
    def give(self, share: float) -> None:
        """Make the matrix the original and a share of the change as it is now."""
        self._given = self.a.clone(), share * self.b
        self._weight.copy_(self._original.to(self._weight.device) + self._given[1] @ self._given[0])


class AdaptedView(dense.View):
    """A layer of the draft with a share of what its adapters have been trained to, whatever its matrices have been given."""

    share = 1.0

    def __init__(self, block: LayerView, draft: Runner, generator: torch.Generator) -> None:
        super().__init__(block.layout, block.data, draft.dtype)
        matrices = [name for name, shape in draft.spec.layer_tensors(block.i) if len(shape) == 2]
        self.adapters = {name.removesuffix(".weight"): Adapter(self._tensors[name], generator) for name in matrices}

    def linear(self, x: Tensor, name: str) -> Tensor:
        """See `LayerWeights.linear`."""
        return super().linear(x, name) + self.adapters[name](x, self.share).to(x.dtype)

    def linears(self, x: Tensor, names: Several[str]) -> tuple[Tensor, ...]:
        """One by one."""
        return LayerWeights.linears(self, x, names)


@dataclass(frozen=True)
class TextContext:
    """A `PassContext` for the rows of one text, of which nothing is kept: gradients flow."""

    row_inputs: tuple[Any, ...]

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, *,
        scale: float, window: int | None = None, rotary: tuple[Tensor, Tensor] | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """See `PassContext.attend`; only native layers are learned, which have no softcap and no sinks."""
        assert k is not None and v is not None and rotary is not None, "so native layers call it"
        places = torch.arange(len(q), device=q.device)
        back = places[:, None] - places
        q, k = (reference.rotate(one, *rotary) for one in (q, k))
        visible = (back >= 0) & (back < (window or len(q)))
        return reference.torch_attention(q, k.transpose(0, 1), v.transpose(0, 1), visible, scale)


class Learner:
    """Trains adapters of a draft between the layers of the target's passes, and serves them while they gain.

    draft  its weights change in place
    meter  of the target's link: a slice of training is done where a layer has been waited for as long as one takes
    kept   name under which what gains is kept for later runs; None: it is not
    n_predicted  of the target's most probable tokens that it learns from; 0 once it has ended
    """

    n_predicted = 8

    def __init__(self, draft: Runner, meter: LinkMeter, kept: str | None = None) -> None:
        self._draft, self._meter, self._kept_as = draft, meter, kept
        generator = torch.Generator().manual_seed(0)
        self._layers = [AdaptedView(block, draft, generator) for block in draft.streamer.sweep()]
        rest = draft.non_layer
        assert isinstance(rest, dense.View), "no others are learned"
        # Views of its own: those that drafts have made are of inference, which gradients refuse.
        self._rest = dense.View(rest.layout, rest.block, draft.dtype)
        parameters = self._parameters()
        self._optimizer = torch.optim.AdamW(parameters.values(), lr=_RATE, weight_decay=0.0)
        self._rows: dict[Sequence, tuple[int, list[TopTokens]]] = {}  # from which token on
        self._new: deque[Passage] = deque(maxlen=_N_RECENT)
        self._recent: deque[Passage] = deque(maxlen=_N_RECENT)
        self._gains: deque[float] = deque(maxlen=_MOST_JUDGED)
        self._random, self._serves = random.Random(0), False
        self._n_slices = self._n_left = self._n_without = 0
        self._waited_s = self._slice_s = 0.0
        self._load(parameters)

    def add(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Keep what the target predicted after a sequence's last token and the accepted ones, which it has not taken yet."""
        self._cut(sequence, _N_LABELLED)
        self._rows.setdefault(sequence, (len(sequence.tokens) - 1, []))[1].append(predicted)

    def end(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._cut(sequence, 1)
        self._rows.pop(sequence, None)

    def work(self) -> None:
        """Do a slice of training, if there is something to learn and time that is free; to be called behind each layer."""
        now_s = self._meter.waited_s
        waited_s, self._waited_s = now_s - self._waited_s, now_s
        if not self.n_predicted or not (self._new or self._n_left):
            return
        if waited_s <= self._slice_s:
            self._slice_s *= _DOUBT
            return
        started = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                self._slice()
        except torch.OutOfMemoryError:
            self._stop()
        self._draft.finish()
        self._slice_s += _NEWEST * (time.perf_counter() - started - self._slice_s)

    def loss(self, passage: Passage, share: float) -> Tensor:
        """Cross-entropy in nats (m,) of the draft with a share of its change; tokens but the target's best are one class."""
        draft, n = self._draft, len(passage.tokens)
        spec, last, places = draft.spec, draft.spec.vocab_size - 1, torch.arange(n)
        of_text = [passage.tokens.clamp(max=last), *passage.labels, *spec.row_inputs(places, places + 1, draft.dtype)]
        ids, tokens, probs, *rotary = ops.to_device(of_text, draft.device)
        x, inputs = spec.embed(self._rest, ids, tuple(rotary))
        for i, view in enumerate(self._layers):
            view.share = share
            x = spec.layer(i, view, x, TextContext(inputs))
        logits = spec.head(self._rest, x[n - len(tokens) :]).float()
        best = logits.log_softmax(-1).gather(1, tokens.clamp(max=last)).masked_fill(tokens > last, -1e4)
        rest = torch.log1p(-best.exp().sum(-1).clamp(max=1 - 1e-6))
        probs = probs.masked_fill(tokens > last, 0.0)
        return -((probs * best).sum(-1) + (1 - probs.sum(-1)).clamp(min=0) * rest)

    def save(self) -> None:
        """Keep what gains for later runs; where the cache cannot be written, they begin anew."""
        with suppress(OSError, RuntimeError):
            if self._kept_as is not None and self._serves:
                cache_directory().mkdir(parents=True, exist_ok=True)
                write_atomically(self._path, save({name: one.data for name, one in self._parameters().items()}))
            elif self._kept_as is not None:
                self._path.unlink(missing_ok=True)

    @property
    def _path(self) -> Path:
        return cache_directory() / f"draft-{self._kept_as}.safetensors"

    def _parameters(self) -> dict[str, Tensor]:
        named = [(f"{i}.{name}", one) for i, view in enumerate(self._layers) for name, one in view.adapters.items()]
        return {f"{name}.{part}": getattr(one, part) for name, one in named for part in ("a", "b")}

    def _load(self, parameters: dict[str, Tensor]) -> None:
        """Serve what an earlier run has kept, if it is whole and of adapters like these."""
        found = {}
        with suppress(OSError, RuntimeError, SafetensorError):
            found = load_file(self._path) if self._kept_as else {}
        shapes = {name: one.shape for name, one in parameters.items()}
        if {name: one.shape for name, one in found.items() if one.isfinite().all()} == shapes:
            for name, one in parameters.items():
                one.data.copy_(found[name])
            self._serve(True)

    def _cut(self, sequence: Sequence, least: int) -> None:
        """Make a passage of what is kept of a sequence, if that is of so many of its tokens."""
        first, rows = self._rows.get(sequence, (0, []))
        n = min(sum(len(one.tokens) for one in rows), len(sequence.tokens) - first)
        if n >= least:
            del self._rows[sequence]
            labels = TopTokens(*(torch.cat(parts)[:n] for parts in zip(*rows, strict=True)))
            self._new.append(Passage(torch.tensor(sequence.tokens[max(first - _N_BEFORE, 0) : first + n]), labels))

    def _slice(self) -> None:
        """Learn from one passage, a new one if there is one, which first tells what has been gained."""
        is_new = bool(self._new)
        passage = self._new.popleft() if is_new else self._random.choice(self._recent)
        self._n_left += _N_USES - 1 if is_new else -1
        loss, self._n_slices = self.loss(passage, 1.0), self._n_slices + 1
        torch.autograd.backward([loss.sum()])
        if is_new:
            self._recent.append(passage)
            with torch.no_grad():
                self._judge(float((self.loss(passage, 0.0) - loss).mean()))
        for group in self._optimizer.param_groups:
            group["lr"] = _RATE * min(self._n_slices / _WARM_UP, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _judge(self, gain: float) -> None:
        """Serve what has been learned while the gain, in nats, is above 0 by two standard errors; end where it never is."""
        self._gains.append(gain)
        n = len(self._gains)
        if n < _LEAST_JUDGED:
            return
        pays = fmean(self._gains) > 2 * stdev(self._gains) / math.sqrt(n)
        self._n_without = 0 if pays else self._n_without + 1
        if pays or self._serves:
            self._serve(pays)
        if self._n_without >= _PATIENCE:
            self._stop()

    def _serve(self, is_served: bool) -> None:
        self._serves = is_served
        for view in self._layers:
            for one in view.adapters.values():
                one.give(float(is_served))

    def _stop(self) -> None:
        """End for good: the draft is as it was."""
        self._serve(False)
        self.n_predicted = 0


def learning_nbytes(spec: Architecture, dtype: DType, device: torch.device) -> int:
    """Bytes on the device that learning a draft takes beside its weights, in `dtype`."""
    matrices = [shape for i in range(spec.n_layers) for _, shape in spec.layer_tensors(i) if len(shape) == 2]
    # What is trained, its gradients and their moments; what is served; the change of the largest matrix.
    adapters = 4 * (6 * _RANK * sum(map(sum, matrices)) + 2 * max(map(math.prod, matrices)))
    originals = dtype.itemsize * sum(map(math.prod, matrices)) if device.type == "cpu" else 0
    n_labelled = 2 * _N_LABELLED
    layer = spec.scratch_nbytes(_N_BEFORE + n_labelled, 0, dtype.itemsize)
    return adapters + originals + 2 * (spec.n_layers * layer + spec.scratch_nbytes(0, n_labelled, dtype.itemsize))

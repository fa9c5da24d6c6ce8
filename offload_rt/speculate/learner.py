"""Online distillation: train low-rank adapters of the draft on the target's predictions.

Online speculative decoding (Liu et al. 2023, arXiv 2310.07177) with adapters (Hu et al. 2021,
arXiv 2106.09685). Training uses time spent waiting for the link. Each passage is evaluated before
training on it, which measures the gain on unseen text. While the gain is significant, the adapters
are merged into the matrices, so drafting speed is unchanged.
"""

import math
import random
import time
from collections import abc, deque
from contextlib import suppress
from dataclasses import dataclass
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
from offload_rt.models.architecture import Architecture
from offload_rt.models.layers import Attention, LayerWeights
from offload_rt.offload.meter import LinkMeter
from offload_rt.offload.streamer import LayerView
from offload_rt.ops import reference
from offload_rt.sampling import TopTokens
from offload_rt.system.files import cache_directory, write_cache_file
from offload_rt.weights.view import View

_RANK = 16
# Minimum labelled tokens of a passage (a pass may add more), and context tokens before them.
_N_LABELLED = 32
_N_BEFORE = 96
# Training steps per passage, and number of recent passages to draw from.
_N_USES = 16
_N_RECENT = 64
# Learning rate, and number of warm-up steps.
_RATE = 2e-3
_WARM_UP = 20
# Passages per evaluation (minimum, maximum), and passages without gain before training stops.
_LEAST_JUDGED = 8
_MOST_JUDGED = 32
_PATIENCE = 256
# Weight of the newest slice in the estimated slice time, and decay of the estimate when skipped.
_NEWEST = 0.25
_DOUBT = 0.99


class Passage(NamedTuple):
    """Tokens (n,) int64, and the target's top predictions (m, k) after the last m tokens."""

    tokens: Tensor
    labels: TopTokens


class Adapter:
    """Low-rank change b @ a of a matrix (n_out, n_in): a trained version, and a merged version."""

    def __init__(self, weight: Tensor, generator: torch.Generator) -> None:
        n_out, n_in = weight.shape
        a = torch.randn(_RANK, n_in, generator=generator) / math.sqrt(n_in)
        b = torch.zeros(n_out, _RANK)
        self._weight = weight
        self._original = weight.to("cpu", copy=True)
        self.a, self.b = (matrix.to(weight.device).requires_grad_() for matrix in (a, b))
        self._merged = self.a.detach().clone(), self.b.detach().clone()

    def __call__(self, x: Tensor, share: float) -> Tensor:
        """Return the adapted product minus the product with the current matrix.

        x      (n, n_in)
        share  scale of the trained change relative to the original matrix
        Returns (n, n_out) float32.
        """
        a = torch.cat((self.a, self._merged[0]))
        b = torch.cat((share * self.b, -self._merged[1]), dim=1)
        return F.linear(F.linear(x.float(), a), b)

    @torch.no_grad()
    def merge(self, share: float) -> None:
        """Set the matrix to the original plus a share of the current change."""
        a, b = self._merged = self.a.clone(), share * self.b
        self._weight.copy_(self._original.to(self._weight.device) + b @ a)


class AdaptedView(View):
    """Draft layer with a share of its trained adapters, independent of merged changes."""

    share = 1.0

    def __init__(self, block: LayerView, draft: Runner, generator: torch.Generator) -> None:
        super().__init__(block.layout, block.data, draft.dtype)
        self.adapters = {
            name.removesuffix(".weight"): Adapter(self._tensors[name], generator)
            for name, shape in draft.spec.layer_tensors(block.i)
            if len(shape) == 2
        }

    def linear(self, x: Tensor, name: str) -> Tensor:
        return super().linear(x, name) + self.adapters[name](x, self.share).to(x.dtype)

    def linears(self, x: Tensor, names: abc.Sequence[str]) -> tuple[Tensor, ...]:
        return LayerWeights.linears(self, x, names)


@dataclass(frozen=True)
class TextContext:
    """`PassContext` for a single text without a cache; differentiable."""

    row_inputs: tuple[Any, ...]

    def attend(self, asked: Attention) -> Tensor:
        """See `PassContext.attend`. Only native layers are trained: no softcap, no sinks."""
        k, v = asked.k, asked.v
        rotary = asked.rotary
        assert k is not None and v is not None and rotary is not None, "native layers pass all"
        places = torch.arange(len(k), device=k.device)
        back = places[:, None] - places
        q, k = (reference.rotate(states, *rotary) for states in (asked.q, k))
        visible = (back >= 0) & (back < (asked.window or len(q)))
        keys, values = k.transpose(0, 1), v.transpose(0, 1)
        return reference.tree_attention(q, keys, values, visible, asked.scale)


class Learner:
    """Train adapters between layers of the target's passes, and merge them while they gain.

    draft        its weights change in place
    meter        waiting time of the target's link; a slice runs if the last wait was long enough
    kept         name of the saved adapters for later runs; None to disable saving
    n_predicted  top target predictions used as labels; 0 after training has stopped
    """

    n_predicted = 8

    def __init__(self, draft: Runner, meter: LinkMeter, kept: str | None = None) -> None:
        self._draft = draft
        self._meter = meter
        self._file = kept and f"draft-{kept}.safetensors"
        generator = torch.Generator().manual_seed(0)
        self._layers = [AdaptedView(block, draft, generator) for block in draft.streamer.sweep()]
        rest = draft.non_layer
        assert isinstance(rest, View), "only dense weights are trained"
        # A separate view: tensors created in inference mode cannot record gradients.
        self._rest = View(rest.layout, rest.block, draft.dtype)
        parameters = self._parameters()
        self._optimizer = torch.optim.AdamW(parameters.values(), lr=_RATE, weight_decay=0.0)
        # First labelled token, and the labels per pass.
        self._rows: dict[Sequence, tuple[int, list[TopTokens]]] = {}
        self._new: deque[Passage] = deque(maxlen=_N_RECENT)
        self._recent: deque[Passage] = deque(maxlen=_N_RECENT)
        self._gains: deque[float] = deque(maxlen=_MOST_JUDGED)
        self._random = random.Random(0)
        self._serves = False
        self._n_slices = self._n_left = self._n_without = 0
        self._waited_s = self._slice_s = 0.0
        self._load(parameters)

    def add(self, sequence: Sequence, predicted: TopTokens) -> None:
        """Record the target's predictions after the last and the accepted tokens.

        Call before the sequence is extended.
        """
        self._cut(sequence, _N_LABELLED)
        self._rows.setdefault(sequence, (len(sequence.tokens) - 1, []))[1].append(predicted)

    def end(self, sequence: Sequence) -> None:
        """Turn the remaining labels of a finished sequence into a passage."""
        self._cut(sequence, 1)
        self._rows.pop(sequence, None)

    def work(self) -> None:
        """Run a training slice if there are passages and free time; call after each layer."""
        now_s = self._meter.waited_s
        waited_s = now_s - self._waited_s
        self._waited_s = now_s
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
        """Return the cross-entropy (m,) in nats of the draft with a share of its change.

        Tokens outside the target's top predictions form a single class.
        """
        draft = self._draft
        spec = draft.spec
        n = len(passage.tokens)
        last = spec.vocab_size - 1
        places = torch.arange(n)
        row_inputs = spec.row_inputs(places, places + 1, draft.dtype)
        inputs = [passage.tokens.clamp(max=last), *passage.labels, *row_inputs]
        ids, tokens, probs, *rotary = ops.to_device(inputs, draft.device)
        x, layer_inputs = spec.embed(self._rest, ids, tuple(rotary))
        for i, view in enumerate(self._layers):
            view.share = share
            x = spec.layer(i, view, x, TextContext(layer_inputs))
        logits = spec.head(self._rest, x[n - len(tokens) :]).float()
        best = logits.log_softmax(-1).gather(1, tokens.clamp(max=last))
        best = best.masked_fill(tokens > last, -1e4)
        rest = torch.log1p(-best.exp().sum(-1).clamp(max=1 - 1e-6))
        probs = probs.masked_fill(tokens > last, 0.0)
        return -((probs * best).sum(-1) + (1 - probs.sum(-1)).clamp(min=0) * rest)

    def save(self) -> None:
        """Save adapters with a gain, remove adapters without."""
        if self._file is None:
            return
        if self._serves:
            parameters = {name: parameter.data for name, parameter in self._parameters().items()}
            write_cache_file(self._file, save(parameters))
        else:
            with suppress(OSError, RuntimeError):
                (cache_directory() / self._file).unlink(missing_ok=True)

    def _parameters(self) -> dict[str, Tensor]:
        return {
            f"{i}.{name}.{part}": getattr(adapter, part)
            for i, view in enumerate(self._layers)
            for name, adapter in view.adapters.items()
            for part in ("a", "b")
        }

    def _load(self, parameters: dict[str, Tensor]) -> None:
        saved = {}
        with suppress(OSError, RuntimeError, SafetensorError):
            saved = load_file(cache_directory() / self._file) if self._file else {}
        finite = {name: part.shape for name, part in saved.items() if part.isfinite().all()}
        if finite == {name: parameter.shape for name, parameter in parameters.items()}:
            for name, parameter in parameters.items():
                parameter.data.copy_(saved[name])
            self._serve(True)

    def _cut(self, sequence: Sequence, least: int) -> None:
        """Turn recorded labels into a passage if there are at least `least`."""
        first, rows = self._rows.get(sequence, (0, []))
        n = min(sum(len(labels.tokens) for labels in rows), len(sequence.tokens) - first)
        if n >= least:
            del self._rows[sequence]
            labels = TopTokens(*(torch.cat(parts)[:n] for parts in zip(*rows, strict=True)))
            context = sequence.tokens[max(first - _N_BEFORE, 0) : first + n]
            self._new.append(Passage(torch.tensor(context), labels))

    def _slice(self) -> None:
        """Train on a passage; a new passage is evaluated first."""
        is_new = bool(self._new)
        passage = self._new.popleft() if is_new else self._random.choice(self._recent)
        self._n_left += _N_USES - 1 if is_new else -1
        loss = self.loss(passage, 1.0)
        self._n_slices += 1
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
        """Merge adapters while the mean gain in nats exceeds two standard errors.

        Training stops after `_PATIENCE` passages without gain.
        """
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
            for adapter in view.adapters.values():
                adapter.merge(float(is_served))

    def _stop(self) -> None:
        self._serve(False)
        self.n_predicted = 0


def learning_nbytes(spec: Architecture, dtype: DType, device: torch.device) -> int:
    """Return device bytes for training a draft in `dtype`, besides its weights."""
    shapes = (shape for i in range(spec.n_layers) for _, shape in spec.layer_tensors(i))
    matrices = [shape for shape in shapes if len(shape) == 2]
    # Adapters, gradients, two moments, merged adapters; and the change of the largest matrix.
    adapters = 4 * (6 * _RANK * sum(map(sum, matrices)) + 2 * max(map(math.prod, matrices)))
    originals = dtype.itemsize * sum(map(math.prod, matrices)) if device.type == "cpu" else 0
    n_labelled = 2 * _N_LABELLED
    layer = spec.scratch_nbytes(_N_BEFORE + n_labelled, 0, dtype.itemsize)
    head = spec.scratch_nbytes(0, n_labelled, dtype.itemsize)
    return adapters + originals + 2 * (spec.n_layers * layer + head)

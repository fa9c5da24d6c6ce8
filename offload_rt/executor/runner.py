"""One model, one pass: every layer is visited once, for all sequences of the batch."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload_rt import ops
from offload_rt.chunks import CHUNK_ROWS
from offload_rt.errors import machine_error
from offload_rt.executor.cuda_graphs import Capture, GraphRunner, GraphShape, PassRows, ResidentModel, keep_tapped
from offload_rt.executor.step import Chunk, Segment, Step
from offload_rt.kv.cache import ContiguousCache, KVBuffer, KVCache
from offload_rt.kv.chosen import best_chunks
from offload_rt.kv.host import HostCache
from offload_rt.kv.recurrent import RecurrentCache
from offload_rt.kv.sparse import SparseCache
from offload_rt.kv.split import KVShare
from offload_rt.models.architecture import Architecture, LayerWeights
from offload_rt.models.heads import HeadDecoder
from offload_rt.models.stage import Stage
from offload_rt.models.tensor_parallel import TensorParallelModel
from offload_rt.offload.expert_cache import ExpertCache
from offload_rt.offload.far_rows import FarRows
from offload_rt.offload.streamer import LayerView, Streamer
from offload_rt.system.machine import ComputeTimes
from offload_rt.system.trace import COMPUTE, Trace
from offload_rt.weights.formats import WeightFormat

# When memory runs out, chunks shrink down to the least.
_LEAST_CHUNK_ROWS = 16
# Rows whose logits there are at once, where those of a prompt are read.
_READ_ROWS = 64


Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")


def _everywhere(method: Method) -> Method:
    """Let the runners of other ranks do what this one does; they are told of the outermost call."""

    @wraps(method)
    def call(self: "Runner", *args: Any, **kwargs: Any) -> Any:
        with self.everywhere(method.__name__, args, kwargs):
            return method(self, *args, **kwargs)

    return call  # type: ignore[return-value]  # it takes and gives the same


def _tell_nobody(*call: Any) -> AbstractContextManager[None]:
    """There are no other ranks."""
    return nullcontext()


@dataclass(eq=False, repr=False)
class Runner:
    """Computes logits and owns the caches. Layers come from the streamer; embedding, last norm and head are resident.

    kv   the kind of caches that are all on the device
    far  where rows lie that are not; None: all are
    experts  of mixtures that come as rows need them; None: they are part of their layers
    taps    after how many layers a pass leaves the hidden states of its rows for a drafter, see `tapped`
    tapped  (n_rows, len(taps), hidden_size) for each step of the last pass, until the next one
    meanwhile  called behind each layer, while the next one may be on its way
    tell    takes (method, args, kwargs) that the runners of other ranks are to do as well, while this one does
    """

    spec: Architecture
    streamer: Streamer
    non_layer: LayerWeights
    format: WeightFormat
    device: torch.device
    dtype: torch.dtype
    trace: Trace
    kv: type[ContiguousCache] = ContiguousCache
    far: FarRows | None = None
    experts: ExpertCache | None = None
    taps: tuple[int, ...] = ()
    meanwhile: Callable[[], None] = lambda: None
    tell: Callable[..., AbstractContextManager[None]] = _tell_nobody
    tapped: Sequence[Tensor] = field(default=(), init=False)

    def __post_init__(self) -> None:
        self._chunk_rows, self._ids = CHUNK_ROWS, itertools.count()
        self._caches: dict[int, KVCache] = {}
        self._graphs: GraphRunner | None = None
        self._times: ComputeTimes | None = None
        self.kv = RecurrentCache if self.spec.state_shapes else self.kv

    @torch.inference_mode()
    def forward(self, steps: Sequence[Step]) -> list[Tensor]:
        """One sweep over the layers; writes the pending rows of every cache.

        Returns per step logits (n_wanted, vocabulary) in the dtype of the computation, or what its `reduce` makes of them.
        Raises CapacityError if a cache is too small, LinkError if a layer does not arrive.
        """
        with self.everywhere("forward", (steps,)):  # not by a decorator: no frame more in the way of each product
            self.tapped = ()
            for step in steps:
                self._caches[step.cache].begin(step.tokens.tolist())
            if len(steps) == 1 and self.replays(steps[0]):
                return [self._replay(steps[0])]
            ids, chunks = self.upload(steps)
            hidden, chunks = self.embed(ids, chunks)
            hidden = self._joined(hidden, steps)
            tapped = hidden.new_empty(len(hidden), len(self.taps), hidden.shape[1])
            keep_tapped(self.taps, tapped, hidden, 0)
            # Where nothing is streamed, chunks follow each other through the ranks of a pipeline.
            goes_by_chunk = isinstance(self.spec, Stage) and not self.streamer.order and self.far is None
            for some in [[one] for one in chunks] if goes_by_chunk else [chunks]:
                with self._bring_rows(some), closing(self.streamer.sweep()) as sweep:
                    for block in sweep:
                        with self.trace.span(COMPUTE, f"layer {block.i}"):
                            self.layer(block, hidden, some)
                        keep_tapped(self.taps, tapped, hidden, block.i + 1)
                        self.meanwhile()
            self.tapped = torch.split(tapped, [step.n_rows for step in steps])
            with self.trace.span(COMPUTE, "head"):
                logits = self.logits(hidden, steps)
            return [step.reduce(rows) if step.reduce else rows for step, rows in zip(steps, logits, strict=True)]

    def _joined(self, x: Tensor, steps: Sequence[Step]) -> Tensor:
        states = [step.states for step in steps if step.states is not None]
        if not states:
            return x
        assert isinstance(self.spec, HeadDecoder), "only rows of a head have hidden states beside them"
        return self.spec.join(self.non_layer, x, torch.cat(states))

    def _bring_rows(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]:
        """Bring the rows beyond the device that the layers read in a pass, in the order in which they do."""
        if self.far is None:
            return nullcontext()
        segments = [one for chunk in chunks for one in chunk.segments]
        layers = range(self.spec.n_layers)
        return self.far.bring([rows for i in layers for one in segments for rows in one.cache.beyond(i)])

    @contextmanager
    def everywhere(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Iterator[None]:
        """What is done within, the runners of other ranks do by this method; they are told of the outermost one."""
        tell, self.tell = self.tell, _tell_nobody
        try:
            with tell(method, args, kwargs or {}):
                yield
        except torch.OutOfMemoryError as error:
            if tell is _tell_nobody:
                raise
            raise machine_error(error) from error  # the others cannot go back and try again
        finally:
            self.tell = tell

    def finish(self, logits: Sequence[Tensor] = ()) -> list[bool]:
        """Wait until the device has computed all that was enqueued; copies go on.

        Returns which of these logits are all numbers; `sampling.probs` finds that out on a CPU.
        """
        if self.device.type == "cpu":
            return [True] * len(logits)
        done = torch.ones((), dtype=torch.bool, device=self.device)
        _, *found = ops.to_host([done, *(rows.amax(-1).isfinite().all() for rows in logits)], is_long=True)
        return [bool(one) for one in found]

    def use_graphs(self, most: GraphShape, capture: Capture, seconds: float = 0.0) -> None:
        """From now on compute passes of one sequence by graphs, up to this shape; all layers must be resident.

        seconds  spent at most, beside one pass, on capturing those that are likely to come
        """
        if self.kv is not ContiguousCache or not self.spec.is_native or isinstance(self.spec, Stage):
            return
        model = ResidentModel(self.spec, self.resident_layers(), self.non_layer, self.taps)
        new_buffer = partial(KVBuffer.empty, self.spec.kv_shapes, dtype=self.dtype, device=self.device)
        ranks = self.spec.ranks if isinstance(self.spec, TensorParallelModel) else None
        self._graphs = GraphRunner(model, most, new_buffer, capture, ranks)
        if seconds and ranks is None:  # these have clocks of their own, and capture alike what comes
            self._graphs.prepare(seconds)

    def resident_layers(self) -> list[LayerWeights]:
        """The weights of all layers, which must be resident."""
        return [self.format.view(block.layout, block.data, self.dtype) for block in self.streamer.sweep()]

    def close(self) -> None:
        """End all transfers, and drop what was captured, which holds the weights."""
        self._graphs = None
        if self.far is not None:
            self.far.close()
        if self.experts is not None:
            self.experts.close()
        self.streamer.close()

    @property
    def has_graphs(self) -> bool:
        """Whether a sequence that runs alone takes the one buffer that passes are captured for."""
        return self._graphs is not None

    def replays(self, step: Step) -> bool:
        """Whether graphs serve for a step."""
        cache, n_tokens = self._caches[step.cache], len(step.tokens)
        shape = GraphShape(step.n_rows, cache.n_held + n_tokens, n_tokens)
        is_whole = cache.n_seen == cache.n_held and step.read is None and cache.leader is None
        return self._graphs is not None and is_whole and self._graphs.fits(cache, shape)

    def _replay(self, step: Step) -> Tensor:
        """What `forward` gives for a step that graphs serve for."""
        cache, n_tokens = self._caches[step.cache], len(step.tokens)
        assert self._graphs is not None and isinstance(cache, ContiguousCache), "it has been asked for"
        whole = Segment(step, cache, step.n_done, n_tokens, slice(0, step.n_rows))
        rows = torch.arange(step.n_done, n_tokens) + cache.n_held
        inputs = PassRows(step.tokens[step.n_done :], rows, self._row_inputs([whole]), whole.mask())
        with self.trace.span(COMPUTE, "all layers"):
            out = self._graphs.forward(cache.buffer, inputs, step.reduce)[step.n_rows - step.n_wanted :]
        self.tapped = (self._graphs.tapped[: step.n_rows],)
        return out

    def embed(self, ids: Tensor, chunks: Sequence[Chunk]) -> tuple[Tensor, list[Chunk]]:
        """Hidden states (n, hidden_size) of the tokens ids (n,), and the chunks with what the layers need of their rows."""
        parts = [self.spec.embed(self.non_layer, ids[one.rows], one.row_inputs) for one in chunks]
        hidden = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts])
        return hidden, [replace(one, row_inputs=inputs) for one, (_, inputs) in zip(chunks, parts, strict=True)]

    def layer(self, block: LayerView, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """One layer on all rows, in place: hidden (n, hidden_size)."""
        weights = self._weights(block)
        for chunk in chunks:
            hidden[chunk.rows] = self.spec.layer(block.i, weights, hidden[chunk.rows], chunk)

    def _weights(self, block: LayerView) -> LayerWeights:
        weights = self.format.view(block.layout, block.data, self.dtype)
        if self.experts is not None:
            weights.experts = self.experts.of_layer(block.i, partial(self._following, block.i))
        return weights

    def _following(self, i: int) -> LayerWeights | None:
        """The weights of the next layer that has experts, where it is on the device."""
        assert self.experts is not None
        layers = (j for j in self.experts.mixture.layers if j > i)
        there = next((self.streamer.resident(j) for j in layers), None)
        return None if there is None else self._weights(there)

    @_everywhere
    def shrink_chunks(self) -> bool:
        """Halve the rows that go through a layer together; returns whether they could be halved."""
        could = self._chunk_rows > _LEAST_CHUNK_ROWS
        self._chunk_rows = max(self._chunk_rows // 2, _LEAST_CHUNK_ROWS)
        return could

    @_everywhere
    def follow_each_other(self, times: ComputeTimes) -> None:
        """Let the rows of a pass go through the ranks of a pipeline in parts, as soon as they can by these times."""
        self._times = times

    @_everywhere
    def new_cache(self, capacity: int, is_alone: bool = False, share: KVShare | None = None) -> int:
        """Id of an empty cache for one sequence, with room for `capacity` rows. The caller frees it.

        is_alone  no other sequence will run beside it: it reuses the graphs of the one before
        share     of its rows on the device; None: all of them
        """
        buffer = self._graphs.reuse(capacity, is_alone and not self._caches) if self._graphs is not None else None
        id, empty = next(self._ids), partial(KVBuffer.empty, self.spec.kv_shapes, dtype=self.dtype, device=self.device)
        if self.far is not None and share is not None and share.n_on_device < capacity:
            self._caches[id] = HostCache(self.spec, empty(share.n_on_device), self.far, share)
        else:
            self._caches[id] = (
                ContiguousCache(buffer) if buffer else self.kv.empty(self.spec, capacity, self.dtype, self.device)
            )
        return id

    @_everywhere
    def renew_cache(
        self, old: int, capacity: int, n_nodes: int, is_alone: bool = False, share: KVShare | None = None,
        may_move: bool = True,
    ) -> int:  # fmt: skip
        """Id of a cache in place of another, which it may be; it has the same rows, or none where they cannot be kept.

        n_nodes   of its trees; the other arguments are those of `new_cache`
        may_move  rows may be copied to another cache where this one is too small
        """
        cache = self._caches[old]
        if (is_alone or not self.has_graphs) and cache.extend(capacity, n_nodes):
            if self.has_graphs and isinstance(cache, ContiguousCache):
                cache.buffer.clear(cache.n_committed)
            cache.query = None
            return old
        # Through memory of the host: there may be no room on the device for both.
        moved = cache.to_host() if may_move and isinstance(cache, ContiguousCache) else None
        del cache
        self.free_cache(old)
        id = self.new_cache(capacity, is_alone, share)
        new = self._caches[id]
        if moved is not None and isinstance(new, ContiguousCache):
            new.load(moved)
        return id

    @_everywhere
    def follow(self, id: int, source: int, tokens: list[int]) -> None:
        """Let an empty cache begin with these tokens of another one, which has them or gets them in the same pass.

        Its rows are computed where one of both is not all on the device.
        """
        cache, leader = self._caches[id], self._caches[source]
        if isinstance(cache, ContiguousCache) and isinstance(leader, ContiguousCache):
            cache.follow(leader, tokens)

    @_everywhere
    def new_view(self, source: int, kind: type[SparseCache], budget: int, n_pending: int) -> int:
        """Id of a view of another cache, for drafts that see at most `budget` of its rows, and `n_pending` of their own."""
        capacity = budget + n_pending + 1  # passes that are captured need a spare row
        buffer = KVBuffer.empty(self.spec.kv_shapes, capacity, self.dtype, self.device)
        id = next(self._ids)
        self._caches[id] = kind(self._caches[source], buffer, budget, self.spec)
        return id

    @_everywhere
    def free_cache(self, id: int) -> None:
        """Release the memory of a cache."""
        cache = self._caches.pop(id)
        cache.close()
        if self._graphs is not None and isinstance(cache, ContiguousCache):
            self._graphs.free(cache.buffer)

    def n_committed(self, id: int) -> int:
        """Committed rows of a cache."""
        return self._caches[id].n_committed

    @_everywhere
    def rewind(self, id: int, tokens: Sequence[int]) -> int:
        """Keep the rows of the longest common prefix with `tokens`; returns how many."""
        return self._caches[id].rewind_to(tokens)

    @_everywhere
    def commit(self, id: int, rows: Sequence[int]) -> None:
        """Keep these pending rows, in ascending order; see `KVCache.commit`."""
        self._caches[id].commit(rows)

    @_everywhere
    def discard(self, id: int) -> None:
        """Drop the pending rows of a cache."""
        self._caches[id].discard()

    def best_chunks(self, id: int, n_tokens: int, n: int, size: int) -> list[int]:
        """See `chosen.best_chunks`; none in captured passes."""
        return best_chunks(self._caches[id], n_tokens, n, size)

    @_everywhere
    def do(self, work: Callable[..., Result], *args: Any) -> Result:
        """A function of this runner and other arguments, of which all that this runner does is no news to other ranks."""
        return work(self, *args)

    @_everywhere
    def assume_context(self, id: int, n: int) -> None:
        """Take the first n rows of a cache for committed, whatever they hold, to time passes after n tokens."""
        self._caches[id].assume(n)

    def upload(self, steps: Sequence[Step]) -> tuple[Tensor, list[Chunk]]:
        """Bring all that a pass needs of its rows to the device, at once: their tokens, and the chunks they go through in."""
        chunks = self._chunks(steps)
        ids = torch.cat([step.tokens[step.n_done :] for step in steps])
        there = iter(ops.to_device([ids, *(one for chunk in chunks for one in chunk.tensors)], self.device))
        return next(there), [chunk.of(there) for chunk in chunks]

    def _chunks(self, steps: Sequence[Step]) -> list[Chunk]:
        """Cut the rows of all steps, one behind the other, into chunks; on the host."""
        parts: list[list[Segment]] = []
        n_rows, chunk_rows = 0, self._rows_together(sum(step.n_rows for step in steps))
        for step in steps:
            start, cache = step.n_done, self._caches[step.cache]
            while start < len(step.tokens):
                at = n_rows % chunk_rows
                if at == 0:
                    parts.append([])
                n = min(chunk_rows - at, len(step.tokens) - start)
                parts[-1].append(Segment(step, cache, start, start + n, slice(at, at + n)))
                start, n_rows = start + n, n_rows + n
        chunks = []
        for first, segments in zip(range(0, n_rows, chunk_rows), parts, strict=True):
            masks = tuple(one.mask() for one in segments)
            rows = slice(first, first + segments[-1].rows.stop)
            inputs = tuple(one.inputs(self.spec.state_shapes[0].kernel) for one in segments if self.spec.state_shapes)
            chunks.append(Chunk(rows, tuple(segments), masks, self._row_inputs(segments), inputs))
        return chunks

    def _rows_together(self, n_rows: int) -> int:
        """Rows of a chunk in a pass of so many."""
        if self._times is None:
            return self._chunk_rows
        assert isinstance(self.spec, Stage) and self.spec.ranks is not None, "rows follow each other through stages"
        return min(self._chunk_rows, -(-n_rows // self._times.n_parts(n_rows, self.spec.ranks.size)))

    def _row_inputs(self, segments: list[Segment]) -> tuple[Tensor, ...]:
        """What the architecture's layers need to know of all rows, on the host."""
        positions = torch.cat([one.positions() for one in segments])
        prompts = torch.cat([torch.full((one.stop - one.start,), one.step.n_prompt) for one in segments])
        return self.spec.row_inputs(positions, torch.maximum(prompts, positions + 1), self.dtype)

    def logits(self, hidden: Tensor, steps: Sequence[Step]) -> list[Tensor]:
        """The head on the rows that each step wants: hidden (n, hidden_size) -> per step (n_wanted, vocabulary)."""
        wanted = []
        for step, rows in zip(steps, torch.split(hidden, [step.n_rows for step in steps]), strict=True):
            n_others = step.n_rows - step.n_wanted
            wanted.append(rows[n_others:])
            if step.read is not None and n_others:
                for part in torch.split(rows[:n_others], _READ_ROWS):
                    step.read(self.spec.head(self.non_layer, part))
        return list(torch.split(self.spec.head(self.non_layer, torch.cat(wanted)), [step.n_wanted for step in steps]))

"""Runners of a model's parts: rank 0 repeats its calls on all ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch

from offload_rt.cost.pass_times import ComputeTimes
from offload_rt.errors import machine_error
from offload_rt.executor.runner import Runner
from offload_rt.executor.step import Chunk
from offload_rt.models.architecture import Architecture
from offload_rt.offload.offloaded_cache import HostMemory
from offload_rt.parallel.model_part import ModelPart
from offload_rt.parallel.pipeline_model import Stage
from offload_rt.system.ranks import Ranks

Method = TypeVar("Method", bound=Callable[..., Any])


def runner_type(spec: Architecture) -> type[Runner]:
    """Return the runner class of a model, or of a part of a model."""
    if isinstance(spec, Stage):
        return PipelineRunner
    return RankRunner if isinstance(spec, ModelPart) else Runner


def _on_all_ranks(method: Method) -> Method:
    """Repeat a method call on further ranks; calls within it stay local."""

    @wraps(method)
    def call(self: "RankRunner", *args: Any, **kwargs: Any) -> Any:
        send = self.send
        self.send = _send_nothing
        try:
            with send(method.__name__, args, kwargs):
                return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if send is _send_nothing:
                raise
            raise machine_error(error) from error  # further ranks cannot roll back and retry
        finally:
            self.send = send

    return call  # type: ignore[return-value]  # same signature


def _send_nothing(*call: Any) -> AbstractContextManager[None]:
    return nullcontext()  # further ranks only receive calls


@dataclass(eq=False, repr=False)
class RankRunner(Runner):
    """Runner of a tensor-parallel shard. All ranks own equal caches.

    send  sends (method, args, kwargs) to the runners of further ranks; set on rank 0
    """

    send: Callable[..., AbstractContextManager[None]] = _send_nothing

    @property
    def ranks(self) -> Ranks:
        """All ranks."""
        assert isinstance(self.spec, ModelPart), "see runner_type"
        assert self.spec.ranks is not None, "only timing runs a stage alone"
        return self.spec.ranks

    forward = _on_all_ranks(Runner.forward)
    shrink_chunks = _on_all_ranks(Runner.shrink_chunks)
    new_cache = _on_all_ranks(Runner.new_cache)
    renew_cache = _on_all_ranks(Runner.renew_cache)
    copy_prefix = _on_all_ranks(Runner.copy_prefix)
    new_view = _on_all_ranks(Runner.new_view)
    free_cache = _on_all_ranks(Runner.free_cache)
    rewind = _on_all_ranks(Runner.rewind)
    commit = _on_all_ranks(Runner.commit)
    discard = _on_all_ranks(Runner.discard)
    do = _on_all_ranks(Runner.do)
    assume_context = _on_all_ranks(Runner.assume_context)

    def least_of_ranks(self, n: int) -> int:
        return int(self.ranks.least(n)[0])


class PipelineRunner(RankRunner):
    """Runner of a pipeline stage."""

    _times: ComputeTimes | None = None

    @_on_all_ranks
    def overlap(self, times: ComputeTimes) -> ComputeTimes:
        """Split passes into parts that overlap on all ranks, by measured times; return theirs."""
        self._times = times
        return times.pipelined(self.ranks.size)

    def least_of_ranks(self, n: int) -> int:
        return n  # stages are timed alone

    def sum_over_stages(self, seconds: float) -> float:
        return self.ranks.total(seconds)[0]

    def _chunk_size(self, n_rows: int) -> int:
        if self._times is None:
            return self._chunk_rows
        return min(self._chunk_rows, -(-n_rows // self._times.n_parts(n_rows, self.ranks.size)))

    def _groups(self, chunks: Sequence[Chunk]) -> list[Sequence[Chunk]]:
        """Send chunks through the stages separately, unless they share a sweep over the link."""
        is_resident = not self.streamer.order and not isinstance(self.memory, HostMemory)
        return [[chunk] for chunk in chunks] if is_resident else [chunks]

"""Ranks that are threads of this process."""

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from support.tiny import open_llm

MINE = threading.local()
PATIENCE_S = 120.0


class Board:
    """Where the ranks of one run meet."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=PATIENCE_S)
        self.given: list[Any] = [None] * size
        self.calls: list[SimpleQueue[bytes]] = [SimpleQueue() for _ in range(size)]
        self.mail = {(a, b): SimpleQueue[Tensor]() for a in range(size) for b in range(size)}


class ThreadRanks:
    """`Ranks` that are threads of this process."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank = rank
        self.size = self.n_local = board.size
        self._board = board
        self.n_reduced = self.n_gathered = 0

    def _together(self, given: Any, make: Callable[[list[Any]], Any]) -> Any:
        self._board.given[self.rank] = given
        self._board.barrier.wait()
        result = make(self._board.given)
        self._board.barrier.wait()
        return result

    def all_reduce(self, x: Tensor) -> Tensor:
        self.n_reduced += 1
        return self._together(x, lambda given: sum(tensor.float() for tensor in given).to(x.dtype))

    def all_gather(self, x: Tensor) -> Tensor:
        self.n_gathered += 1
        return self._together(x, lambda given: torch.cat(given, 1))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._together(x, lambda given: given[0].clone())

    def least(self, *numbers: int) -> list[int]:
        return self._together(numbers, lambda given: list(map(min, zip(*given, strict=True))))

    def total(self, *numbers: float) -> list[float]:
        return self._together(numbers, lambda given: list(map(sum, zip(*given, strict=True))))

    def send(self, x: Tensor, to: int) -> None:
        self._board.mail[self.rank, to].put(x.clone())

    def receive(self, into: Tensor, source: int) -> None:
        into.copy_(self._board.mail[source, self.rank].get(timeout=PATIENCE_S))

    def refuse_second(self) -> None:
        pass

    finish_sending = refuse_second

    def telling(self, *call: Any) -> AbstractContextManager[None]:
        for queue in self._board.calls[1:]:
            queue.put(pickle.dumps(call))
        return nullcontext()

    def told(self) -> Iterator[Any]:
        return map(pickle.loads, iter(self._board.calls[self.rank].get, b""))

    def leave(self) -> None:
        for queue in self._board.calls[1:] if self.rank == 0 else ():
            queue.put(b"")


def together(size: int, work: Callable[[], Any]) -> list[Any]:
    """Run `work` on each rank and return the results; raise the first error."""
    board = Board(size)

    def run(rank: int) -> Any:
        MINE.ranks = ThreadRanks(rank, board)
        try:
            return work()
        except SystemExit:
            return None
        except BaseException:
            board.barrier.abort()
            MINE.ranks.leave()
            raise

    pools = [ThreadPoolExecutor(1) for _ in range(size)]  # each rank has the variables of a thread
    results = [pool.submit(run, rank) for rank, pool in enumerate(pools)]
    errors = [error for result in results if (error := result.exception(PATIENCE_S)) is not None]
    for pool in pools:
        pool.shutdown()
    causes = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0]
    return [result.result() for result in results]


def opened(config: Callable[[], EngineConfig], read: Callable[[LLM], Any]) -> list[Any]:
    """Open a model on two ranks without loading it; return what `read` returns on each."""

    def work() -> Any:
        with LLM.open(config()) as llm:
            return read(llm)

    return together(2, work)


def tokens_of(llm: LLM, prompt: list[int], n: int = 16, **params: Any) -> list[int]:
    params = SamplingParams(max_tokens=n, ignore_eos=True, **params)
    return llm.generate([prompt], params)[0].token_ids


def divided_tokens(
    size: int, directory: Path, prompt: list[int], n: int = 16, **settings: Any
) -> list[int]:
    def work() -> list[int]:
        with open_llm(directory, **settings) as llm:
            return tokens_of(llm, prompt, n)

    return together(size, work)[0]

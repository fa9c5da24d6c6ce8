"""The ranks of a run that torchrun has started: who they are, what they tell each other, and what becomes of them.

Rank 0 decides what is computed. Each other rank keeps a connection to it, over which it is told what to do and which ends when
either process does: so a rank that dies is missed at once, whatever the others compute.
"""

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Client, Connection, Listener, wait
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from offload_rt.errors import INTERRUPTION, OffloadError, RankError

# Seconds in which a rank that has failed is missed by its connection, after those that compute with it, or torchrun, have
# noticed.
_SOON_S = 0.5
# Seconds that this process has to end by itself where another rank has failed; a product on a card may wait for ever.
_GRACE_S = 5.0
# What a rank says that ends because others do.
_DONE = "done"


def is_first() -> bool:
    """Whether this process is the one that speaks to the user: alone, or rank 0."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


@cache
def joined() -> "Ranks | None":
    """The ranks that torchrun has started; None where this process runs alone. Called by all of them."""
    several = dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if several else None


def end(code: int, sentence: str) -> tuple[int, str]:
    """Exit code of this process and what it prints, where it is to end with these: rank 0 speaks for all."""
    ranks = joined() if joined.cache_info().currsize else None
    if ranks is None:
        return code, sentence if is_first() else ""
    return ranks.leave(code, sentence)


@dataclass(frozen=True)
class Peer:
    """Another rank."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Ranks:
    """All ranks of this run.

    rank, size  the number of this one, and how many there are
    n_local     ranks on this machine
    failure     what has become of another rank
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: RankError | None = None
        self.n_local = int(os.environ["LOCAL_WORLD_SIZE"])
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._is_leaving, self._failed = False, threading.Event()
        self._peers = self._connect()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def _connect(self) -> dict[Connection, Peer]:
        """Connections to the others: of rank 0 to all, of the others to rank 0."""
        me = Peer(self.rank, os.getpid(), socket.gethostname())
        if self.rank > 0:
            found: list[Any] = [None]
            dist.broadcast_object_list(found, 0)
            address, key, first = found[0]
            connection = Client(address, authkey=key)
            connection.send(me)
            return {connection: first}
        host, key = "127.0.0.1" if self.n_local == self.size else "", secrets.token_bytes(32)
        with Listener((host, 0), backlog=self.size, authkey=key) as listener:
            address = (host or os.environ["MASTER_ADDR"], listener.address[1])
            dist.broadcast_object_list([(address, key, me)], 0)
            accepted = [listener.accept() for _ in range(1, self.size)]
        return {one: one.recv() for one in accepted}

    def tell(self, *call: Any) -> None:
        """Send the other ranks what they are to do; by rank 0."""
        self._check()
        for one in self._peers:
            one.send(call)

    def told(self) -> Iterator[Any]:
        """What rank 0 tells this one, until all is done. Raises RankError where rank 0 has ended otherwise."""
        while (call := self._calls.get()) != _DONE:
            self._check()
            yield call

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in float32 or float64, in the dtype of x."""
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        with self._together():
            dist.all_reduce(total)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, width) of all ranks side by side: (n, size * width)."""
        parts = x.new_empty(self.size, *x.shape)
        with self._together():
            dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.movedim(0, 1).flatten(1)

    def least(self, *numbers: int) -> list[int]:
        """The least of each of these numbers over all ranks."""
        found = torch.tensor(numbers)
        with self._together():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return found.tolist()

    def leave(self, code: int, sentence: str = "") -> tuple[int, str]:
        """End this rank's part; returns exit code and what is to be printed, see `end`."""
        if code:  # perhaps it comes of a rank that has just ended, and torchrun has ended this one
            self._failed.wait(_SOON_S)
        self._is_leaving = True
        if self.failure is not None and not (sentence == INTERRUPTION == self.failure.said):
            is_said = self.rank == 0 or (self.rank == 1 and self.failure.rank == 0)
            code, sentence, told = OffloadError.exit_code, f"error: {self.failure}" if is_said else "", _DONE
        else:
            told = sentence.removeprefix("error: ") if self.rank and sentence else _DONE
            sentence = "" if self.rank else sentence
        for one in self._peers:
            with suppress(OSError):  # it has gone already
                one.send(told)
        return code, sentence

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do. Raises RankError where one of them has ended."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # of the libraries that ranks talk by
            self._failed.wait(_SOON_S)
            self._check()
            raise RankError(f"the ranks have lost each other: {error}") from error

    def _watch(self) -> None:
        """Read what others say until they have gone."""
        there = dict(self._peers)
        while there:
            for one in wait(list(there)):
                assert isinstance(one, Connection), "nothing else is waited for"
                try:
                    said = one.recv()
                except (EOFError, OSError):
                    said = None
                if self.rank > 0 and said is not None:
                    self._calls.put(said)
                if said is None or isinstance(said, str):
                    peer = there.pop(one)
                    self._missed(peer, said)

    def _missed(self, peer: Peer, said: str | None) -> None:
        """Another rank has gone, and may have said why."""
        if self._is_leaving or self.failure is not None or said == _DONE:
            return
        self.failure = RankError(f"{peer} has ended" if said is None else f"{peer}: {said}", peer.rank, said)
        self._failed.set()
        self._calls.put(None)
        threading.Thread(target=self._abandon, name="ranks-end", daemon=True).start()

    def _abandon(self) -> None:
        """End this process where it cannot do so itself."""
        time.sleep(_GRACE_S)
        code, sentence = self.leave(OffloadError.exit_code)
        if sentence:
            print(sentence, file=sys.stderr, flush=True)
        os._exit(code)

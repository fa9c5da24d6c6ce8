"""The ranks of a run that torchrun has started: who they are, what they tell each other, and what becomes of them.

Rank 0 decides what is computed. Each other rank keeps a connection to it, over which it is told what to do and which ends when
either process does: so a rank that dies is missed at once, whatever the others compute. What is said over it is pickled, so
ranks trust each other; the key of the connections is made for each run and passed on by torchrun's store.
"""

import atexit
import json
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
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from offload_rt.errors import INTERRUPTION, OffloadError, RankError, SettingsError

# Seconds in which a rank that has failed is missed by its connection, after those that compute with it, or torchrun, have
# noticed.
_SOON_S = 0.5
# Seconds that this process has to end by itself where another rank has ended; a product on a card may wait for ever.
_GRACE_S = 5.0
# Seconds in which all ranks have to come, as torch's own default, and between looks.
_COME_S, _LOOK_S = 1800.0, 0.02
# What a rank says that ends because all is done, or others end.
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
    return ranks.end(code, sentence)


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
    has_begun   the others compute with this one, or have done so
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.failure: RankError | None = None
        self.n_local = int(os.environ["LOCAL_WORLD_SIZE"])
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self.has_begun = self._has_left = self._has_spoken = False
        self._broken: BaseException | None = None  # what has ended a call of this rank that others were told of
        self._failed = threading.Event()
        self._sent: list[tuple[Any, torch.Tensor]] = []  # what is on its way, with what is sent
        # Before anything that waits where no signal is heard.
        with self._together():
            store, *_ = next(rendezvous("env://"))
            self._peers = self._connect(store)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        atexit.register(self.leave)
        sys.excepthook = self._uncaught
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if os.environ.get("OMP_NUM_THREADS") == "1":  # as torchrun sets it, whatever there is
            torch.set_num_threads(max(len(os.sched_getaffinity(0)) // self.n_local, 1))
        with self._together():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def _connect(self, store: Any) -> dict[Connection, Peer]:
        """Connections to the others: of rank 0 to all, of the others to rank 0."""
        me = Peer(self.rank, os.getpid(), socket.gethostname())
        first, *others = (f"rank {i}" for i in range(self.size))
        if self.rank > 0:
            store.set(others[self.rank - 1], "")
            self._await(store, [first])
            host, port, key = json.loads(store.get(first))
            connection = Client((host, port), authkey=bytes.fromhex(key))
            connection.send(me)
            return {connection: connection.recv()}
        host, key = "127.0.0.1" if self.n_local == self.size else "", secrets.token_bytes(32)
        with Listener((host, 0), backlog=self.size, authkey=key) as listener:
            self._await(store, others)
            store.set(first, json.dumps([host or os.environ["MASTER_ADDR"], listener.address[1], key.hex()]))
            accepted = [listener.accept() for _ in others]
        for one in accepted:
            one.send(me)
        return {one: one.recv() for one in accepted}

    def _await(self, store: Any, names: list[str]) -> None:
        until = time.monotonic() + _COME_S
        while not store.check(names):
            if time.monotonic() > until:
                raise RankError(f"not all of {self.size} ranks have come in {_COME_S:.0f} s")
            time.sleep(_LOOK_S)

    def refuse_second(self) -> None:
        """Raises SettingsError once the others compute with this one, or have done so."""
        if self.has_begun:
            raise SettingsError("a second LLM in a run of several ranks", change="go on with the first, or run anew")

    @contextmanager
    def telling(self, *call: Any) -> Iterator[None]:
        """Send the other ranks what they are to do while rank 0 does the same. Where it fails, they are lost."""
        self._check()
        with self._together():
            for one in self._peers:
                one.send(call)
        try:
            yield
        except BaseException as error:
            self._broken = error
            if isinstance(error, Exception):
                self._abandon()
            raise

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
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with self._together():
            dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x of rank 0, which the others may overwrite theirs with."""
        x = x.contiguous()
        with self._together():
            dist.broadcast(x, 0)
        return x

    def least(self, *numbers: float) -> list[Any]:
        """The least of each of these numbers over all ranks."""
        found = torch.tensor(numbers)
        with self._together():
            dist.all_reduce(found, dist.ReduceOp.MIN)
        return found.tolist()

    def total(self, *numbers: float) -> list[float]:
        """The sum of each of these numbers over all ranks."""
        found = torch.tensor(numbers, dtype=torch.float64)
        with self._together():
            dist.all_reduce(found)
        return found.tolist()

    def send(self, x: torch.Tensor, to: int) -> None:
        """Begin to send x, which nothing overwrites before `finish_sending`, to another rank."""
        with self._together():
            self._sent.append((dist.isend(x := x.contiguous(), to), x))

    def finish_sending(self) -> None:
        """Wait until all is there that is on its way."""
        with self._together():
            while self._sent:
                self._sent.pop(0)[0].wait()

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Wait for what another rank sends."""
        with self._together():
            dist.recv(into, source)

    def leave(self, said: str = "") -> None:
        """End this rank's part; `said` is why, for rank 0. May be called again."""
        if self._has_left:
            return
        self._has_left = True
        for one in self._peers:
            with suppress(OSError):  # it has gone already
                one.send(said or _DONE if self.rank else _DONE)

    def end(self, code: int, sentence: str) -> tuple[int, str]:
        """See `end`."""
        if code:  # perhaps it comes of a rank that has just ended, and torchrun has ended this one
            self._failed.wait(_SOON_S)
        said = sentence.removeprefix("error: ")
        self.leave(said)
        speaks, self._has_spoken = self.rank == 0 and not self._has_spoken, True
        if self.failure is not None and self.failure.said != said:
            code, sentence = OffloadError.exit_code, f"error: {self.failure}"
            speaks = speaks or (self.rank == 1 and self.failure.rank == 0)
        return code, sentence if speaks else ""

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """A program that handles no errors ends: rank 0 with a traceback, others with a sentence that rank 0 is told."""
        is_known = isinstance(error, OffloadError | KeyboardInterrupt)
        if self.rank == 0 or not is_known:
            sys.__excepthook__(kind, error, trace)
            self._has_spoken = True
        said = str(error) if is_known else f"{kind.__name__}: {error}"
        _, sentence = self.end(1, INTERRUPTION if isinstance(error, KeyboardInterrupt) else said)
        if sentence:
            print(sentence, file=sys.stderr)

    def _check(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do. Raises RankError where one of them has ended."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, EOFError, OSError) as error:  # of the libraries that ranks talk by
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
                if said is None or isinstance(said, str):
                    self._missed(there.pop(one), said)
                if self.rank > 0:
                    self._calls.put(said)

    def _missed(self, peer: Peer, said: str | None) -> None:
        """Another rank has gone, and may have said why."""
        if self._has_left or self.failure is not None or (self.rank == 0 and said == _DONE):
            return
        if said != _DONE:
            sentence = f"{peer} has ended" if said is None else f"{peer}: {said}"
            self.failure = RankError(sentence, peer.rank, said)
            self._failed.set()
        self._abandon()

    def _abandon(self) -> None:
        """End this process soon, in case that it cannot do so itself."""

        def abandon() -> None:
            time.sleep(_GRACE_S)
            own = f"error: {OffloadError(str(self._broken))}" if self._broken is not None else ""
            code, sentence = self.end(OffloadError.exit_code if self.failure or own else 0, own)
            if sentence:
                print(sentence, file=sys.stderr, flush=True)
            os._exit(code)

        threading.Thread(target=abandon, name="ranks-end", daemon=True).start()

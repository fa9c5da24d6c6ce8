"""Ranks of a run started by torchrun: process group, broadcast calls, failure detection.

Rank 0 decides on the computation. Each further rank keeps a connection to rank 0, which carries
calls and closes when either process ends. A dead rank is therefore detected immediately, even
during a collective. Messages are pickled, so ranks must trust each other. The connection key is
random per run and shared through torchrun's store.
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

# Seconds until a closed connection reveals a failed rank, after a collective or torchrun fails.
_SOON_S = 0.5
# Seconds for this process to end after a further rank has ended; a GPU collective may never return.
_GRACE_S = 5.0
# Timeout for all ranks to connect (torch's default), and polling interval, in seconds.
_COME_S = 1800.0
_LOOK_S = 0.02
# Final message of a rank at normal end, or after a further rank has ended.
_DONE = "done"


def is_first() -> bool:
    """Return whether this process prints for the user: the only process, or rank 0."""
    return not dist.is_torchelastic_launched() or os.environ["RANK"] == "0"


@cache
def joined() -> "Ranks | None":
    """Join the process group of torchrun; None for a single process. Called by all ranks."""
    has_several = dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
    if not has_several:
        return None
    return Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def end(code: int, sentence: str) -> tuple[int, str]:
    """Return exit code and message of this process; rank 0 prints for all ranks."""
    ranks = joined() if joined.cache_info().currsize else None
    if ranks is None:
        return code, sentence if is_first() else ""
    return ranks.end(code, sentence)


@dataclass(frozen=True)
class Peer:
    """A further rank."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"


class Ranks:
    """All ranks of this run.

    rank, size  number of this rank, number of ranks
    has_begun   computation of all ranks has started
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.failure: RankError | None = None
        self.n_local = int(os.environ["LOCAL_WORLD_SIZE"])
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self.has_begun = False
        self._has_left = False
        self._has_spoken = False
        self._broken: BaseException | None = None  # error of this rank during a broadcast call
        self._failed = threading.Event()
        self._sent: list[tuple[Any, torch.Tensor]] = []  # requests in progress, with their tensors
        # Before any blocking call that ignores signals.
        with self._together():
            store, *_ = next(rendezvous("env://"))
            self._peers = self._connect(store)
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()
        atexit.register(self.leave)
        sys.excepthook = self._uncaught
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if os.environ.get("OMP_NUM_THREADS") == "1":  # torchrun's default on any machine
            torch.set_num_threads(max(len(os.sched_getaffinity(0)) // self.n_local, 1))
        with self._together():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, store=store, rank=rank, world_size=size)

    def _connect(self, store: Any) -> dict[Connection, Peer]:
        """Connect rank 0 to all further ranks; return the peers by connection."""
        me = Peer(self.rank, os.getpid(), socket.gethostname())
        first, *names_of_others = (f"rank {i}" for i in range(self.size))
        if self.rank > 0:
            store.set(names_of_others[self.rank - 1], "")
            self._await(store, [first])
            host, port, key = json.loads(store.get(first))
            connection = Client((host, port), authkey=bytes.fromhex(key))
            connection.send(me)
            return {connection: connection.recv()}
        host = "127.0.0.1" if self.n_local == self.size else ""
        key = secrets.token_bytes(32)
        with Listener((host, 0), backlog=self.size, authkey=key) as listener:
            self._await(store, names_of_others)
            address = [host or os.environ["MASTER_ADDR"], listener.address[1], key.hex()]
            store.set(first, json.dumps(address))
            accepted = [listener.accept() for _ in names_of_others]
        for connection in accepted:
            connection.send(me)
        return {connection: connection.recv() for connection in accepted}

    def _await(self, store: Any, names: list[str]) -> None:
        until = time.monotonic() + _COME_S
        while not store.check(names):
            if time.monotonic() > until:
                raise RankError(f"not all of {self.size} ranks connected within {_COME_S:.0f} s")
            time.sleep(_LOOK_S)

    def refuse_second(self) -> None:
        """Raise SettingsError if computation of all ranks has started."""
        if self.has_begun:
            change = "use the existing LLM, or start a new run"
            raise SettingsError("a second LLM in a run of several ranks", change=change)

    @contextmanager
    def telling(self, *call: Any) -> Iterator[None]:
        """Broadcast a call before rank 0 executes it. A failure within ends all ranks."""
        self._check()
        with self._together():
            for connection in self._peers:
                connection.send(call)
        try:
            yield
        except BaseException as error:
            self._broken = error
            if isinstance(error, Exception):
                self._abandon()
            raise

    def told(self) -> Iterator[Any]:
        """Yield calls of rank 0 until the end. Raises RankError if rank 0 ends abnormally."""
        while (call := self._calls.get()) != _DONE:
            self._check()
            yield call

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x over all ranks in float32 or float64; returns the dtype of x."""
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        with self._together():
            dist.all_reduce(total)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate x (n, width) of all ranks: (n, size * width)."""
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        with self._together():
            dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return x of rank 0; may overwrite x on further ranks."""
        x = x.contiguous()
        with self._together():
            dist.broadcast(x, 0)
        return x

    def least(self, *numbers: float) -> list[Any]:
        """Return the minimum of each number over all ranks."""
        reduced = torch.tensor(numbers)
        with self._together():
            dist.all_reduce(reduced, dist.ReduceOp.MIN)
        return reduced.tolist()

    def total(self, *numbers: float) -> list[float]:
        """Return the sum of each number over all ranks."""
        reduced = torch.tensor(numbers, dtype=torch.float64)
        with self._together():
            dist.all_reduce(reduced)
        return reduced.tolist()

    def send(self, x: torch.Tensor, to: int) -> None:
        """Start sending x to a rank; x must stay unchanged until `finish_sending`."""
        with self._together():
            self._sent.append((dist.isend(x := x.contiguous(), to), x))

    def finish_sending(self) -> None:
        """Wait for all sends to complete."""
        with self._together():
            while self._sent:
                self._sent.pop(0)[0].wait()

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receive a tensor from a rank."""
        with self._together():
            dist.recv(into, source)

    def leave(self, said: str = "") -> None:
        """End this rank's participation; `said` is the reason, sent to rank 0. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        for connection in self._peers:
            with suppress(OSError):  # already closed
                connection.send(said or _DONE if self.rank else _DONE)

    def end(self, code: int, sentence: str) -> tuple[int, str]:
        """See `end`."""
        if code:  # possibly a consequence of a rank that has just ended, or of torchrun's signal
            self._failed.wait(_SOON_S)
        said = sentence.removeprefix("error: ")
        self.leave(said)
        speaks = self.rank == 0 and not self._has_spoken
        self._has_spoken = True
        if self.failure is not None and self.failure.said != said:
            code = OffloadError.exit_code
            sentence = f"error: {self.failure.for_command_line}"
            speaks = speaks or (self.rank == 1 and self.failure.rank == 0)
        return code, sentence if speaks else ""

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Handle an uncaught exception: rank 0 prints a traceback, further ranks notify rank 0."""
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
        """Run a collective operation. Raises RankError if a rank has ended."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, EOFError, OSError) as error:  # from the communication libraries
            self._failed.wait(_SOON_S)
            self._check()
            raise RankError(f"the connection between ranks failed: {error}") from error

    def _watch(self) -> None:
        """Read messages of all peers until their connections close."""
        peers = dict(self._peers)
        while peers:
            for connection in wait(list(peers)):
                assert isinstance(connection, Connection), "only connections are awaited"
                try:
                    said = connection.recv()
                except (EOFError, OSError):
                    said = None
                if said is None or isinstance(said, str):
                    self._missed(peers.pop(connection), said)
                if self.rank > 0:
                    self._calls.put(said)

    def _missed(self, peer: Peer, said: str | None) -> None:
        """Handle the end of a peer with an optional reason."""
        if self._has_left or self.failure is not None or (self.rank == 0 and said == _DONE):
            return
        if said != _DONE:
            sentence = f"{peer} has ended" if said is None else f"{peer}: {said}"
            self.failure = RankError(sentence, peer.rank, said)
            self._failed.set()
        self._abandon()

    def _abandon(self) -> None:
        """Exit this process after a grace period, in case it cannot end by itself."""

        def abandon() -> None:
            time.sleep(_GRACE_S)
            broken = self._broken
            known = broken if isinstance(broken, OffloadError) else OffloadError(str(broken))
            sentence = "" if broken is None else f"error: {known.for_command_line}"
            code = OffloadError.exit_code if self.failure or sentence else 0
            code, sentence = self.end(code, sentence)
            if sentence:
                print(sentence, file=sys.stderr, flush=True)
            os._exit(code)

        threading.Thread(target=abandon, name="ranks-end", daemon=True).start()

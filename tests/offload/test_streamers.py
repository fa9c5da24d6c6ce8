"""Contract of streamers: each layer once, in order, with its bytes, in every pass; copies."""

import _thread
import itertools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import pack
from support.fake_gpu import PATIENCE_S, FakeCopyDevice
from support.processes import handled
from support.programs import wait_until
from support.spies import before_calls
from support.streams import N_LAYERS, FakeGPU, Host, RealGPU, Watched, stream_layers, wanted
from torch import Tensor
from torch.overrides import TorchFunctionMode

from offload_rt.errors import LinkError
from offload_rt.offload import copy_device
from offload_rt.offload.copy_device import CopyDevice
from offload_rt.offload.disk import DiskTier, ReadSettings
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.stream_cuda import CudaStreamer
from offload_rt.offload.streamer import LayerSources, LayerView, Streamer
from offload_rt.offload.tier import Tier

KINDS = ("device", "host", "unpinned", "disk")
every_bench = pytest.mark.parametrize(
    "make", [FakeGPU, pytest.param(RealGPU, marks=pytest.mark.cuda), Host]
)


def build_sources(
    device: Host, kinds: Sequence[str], n_slots: int, files: Any, **how: Any
) -> tuple[LayerSources, dict[str, Tier]]:
    """Return sources with layer i in a tier of kind `kinds[i]`, and the streamed tiers."""
    is_real = isinstance(device, RealGPU)
    host = MemoryTier(register=is_real, owns_pinned=not is_real)
    made: dict[str, Any] = {"device": MemoryTier(), "host": host, "unpinned": MemoryTier()}
    made["disk"] = Watched(DiskTier(files, ReadSettings(4096, 2)), **how)
    for i, kind in enumerate(kinds):
        if kind != "disk":
            image = pack(stream_layers()[i])
            made[kind].put(i, device.image(image) if kind == "device" else image)
    resident = made.pop("device")
    streamed = tuple(made.get(kind) for kind in kinds)
    return LayerSources(resident, streamed, n_slots, n_host_slots=n_slots), made


@dataclass
class Bench:
    """A streamer on a device; its layers on disk are watched."""

    streamer: Streamer
    device: Host
    disk: Watched
    kinds: Sequence[str]

    def sweep(self) -> None:
        with closing(self.streamer.sweep()) as sweep:
            read(self, sweep, N_LAYERS + 1)
        self.check(range(len(self.kinds)))

    def check(self, order: Sequence[int]) -> None:
        """Assert that these layers were read twice each since the last check."""
        seen = self.device.seen()
        assert [i for i, _ in seen] == [i for i in order for _ in range(2)]
        for i, got in seen:
            same = [j for j in range(N_LAYERS) if wanted(j) == got]
            assert got == wanted(i), f"layer {i} has the bytes of {same or 'none'}"


@contextmanager
def bench(
    make: type[Host],
    files: Any,
    kinds: Sequence[str] = ("disk",) * N_LAYERS,
    n_slots: int = 3,
    **how: Any,
) -> Iterator[Bench]:
    """A streamer over watched tiers; closed at the end, when none of its threads may be left."""
    device = make()
    before = {*threading.enumerate()}
    sources, tiers = build_sources(device, kinds, n_slots, files, **how)
    streamer = device.stream(sources)
    try:
        yield Bench(streamer, device, tiers["disk"], kinds)
    finally:
        tiers["disk"].trap = None
        streamer.close()
        device.close()
        left = {*threading.enumerate()} - before
        for tier in tiers.values():
            tier.close()
    assert not left, f"threads left alive: {left}"


def read(b: Bench, sweep: Iterator[LayerView], n: int) -> list[LayerView]:
    """Read the next n layers, each on arrival and before the next request."""
    blocks = []
    for block in itertools.islice(sweep, n):
        blocks.append(block)
        b.device.look(block)
        b.device.look(block)
    return blocks


def abandon(b: Bench, n: int) -> None:
    with closing(b.streamer.sweep()) as sweep:
        read(b, sweep, n)
    b.check(range(n))


def park(b: Bench, n: int) -> None:
    """The latest layer stays, and no other is read."""
    with closing(b.streamer.sweep()) as sweep:
        *_, latest = read(b, sweep, n)
        b.check(range(n))
        b.streamer.park()
        n_done = b.disk.n_done.total()
        b.device.look(latest)
        time.sleep(0.005)
        b.device.look(latest)
        b.check([n - 1])
        assert n_done == b.disk.n_done.total()


def hold(b: Bench, n: int) -> None:
    """A sweep is replaced while it is referenced, e.g. by the traceback of a caught interrupt."""
    held = b.streamer.sweep()
    read(b, held, n)
    newer = b.streamer.sweep()
    b.check(range(n))
    read(b, newer, 1)
    with pytest.raises(LinkError, match="another pass"):
        list(held)
    read(b, newer, N_LAYERS)
    b.check(range(len(b.kinds)))


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=N_LAYERS),
    n_slots=st.integers(1, 4),
    n_parallel=st.integers(1, 4),
    late_s=st.sampled_from([0.0, 0.002]),
    seed=st.integers(0, 100),
    unfinished=st.lists(st.tuples(st.sampled_from([abandon, park, hold]), st.integers(1, 6))),
)
@every_bench
def test_layers_arrive_in_order_with_their_bytes(
    make, kinds, n_slots, n_parallel, late_s, seed, unfinished, files
):
    with bench(make, files, kinds, n_slots, n_parallel=n_parallel, late_s=late_s, seed=seed) as b:
        b.sweep()
        for leave, n in unfinished[:3]:
            leave(b, min(n, len(kinds)))
            b.sweep()
        b.sweep()


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@every_bench
def test_next_pass_is_prefetched_up_to_the_slots(make, n_slots, files):
    kinds = ("device", "disk", "device", "disk", "disk", "disk")
    order = [i for i, kind in enumerate(kinds) if kind != "device"]
    with bench(make, files, kinds, n_slots) as b:
        # A streamer that stages blocks on the host may hold as many again there.
        most = n_slots if make is Host else 2 * n_slots
        for n_passes in range(4):
            n_before = n_passes * len(order)
            wait_until(lambda n=n_passes: all(b.disk.n_reads()[i] > n for i in order[:n_slots]))
            time.sleep(0.01)
            assert n_before + n_slots <= b.disk.n_reads().total() <= n_before + most
            b.sweep()


@pytest.mark.parametrize("n_slots", [1, 2, 3])
def test_queued_copies_never_exceed_the_slots(n_slots, files):
    with bench(FakeGPU, files, ("host",) * N_LAYERS, n_slots) as b:
        for n_done, block in enumerate(itertools.chain(b.streamer.sweep(), b.streamer.sweep())):
            wait_until(lambda n=n_done + n_slots: b.device.copies.n_copies == n)
            b.device.look(block)


def test_failing_device_is_raised_by_the_pass(files, monkeypatch):
    """A pass would otherwise wait for copies that no thread starts."""

    def fail(_: FakeCopyDevice) -> None:
        raise ValueError("no device")

    monkeypatch.setattr(FakeCopyDevice, "select", fail)
    with bench(FakeGPU, files) as b, pytest.raises(ValueError, match="no device"):
        b.sweep()


@every_bench
@pytest.mark.parametrize("at", [(0, 1), (3, 1), (5, 1), (0, 2), (2, 2), (5, 3)])
def test_failed_read_is_raised_and_the_next_sweep_restarts(make, at, files):
    error = LinkError("the disk has gone")
    n_raised = 0

    def trap(i: int, n: int) -> None:
        nonlocal n_raised
        if (i, n) == at and not n_raised:
            n_raised += 1
            raise error

    with bench(make, files, late_s=0.001, trap=trap) as b:
        n_failed = 0
        for _ in range(7):
            try:
                b.sweep()
            except LinkError as caught:
                assert caught is error
                n_failed += 1
                done = [i for i, _ in b.device.seen()][::2]
                assert done == list(range(len(done)))
        assert n_failed == n_raised == 1


@every_bench
def test_close_waits_for_a_running_read(make, files):
    going = threading.Event()
    go_on = threading.Event()

    def trap(i: int, n: int) -> None:
        if i == 2:
            going.set()
            assert go_on.wait(PATIENCE_S)

    with bench(make, files, n_slots=4, trap=trap) as b:
        assert going.wait(PATIENCE_S)
        closers = [threading.Thread(target=b.streamer.close) for _ in range(2)]
        for closer in closers:
            closer.start()
        time.sleep(0.02)
        go_on.set()
        for closer in closers:
            closer.join(PATIENCE_S)
            assert not closer.is_alive()


@every_bench
def test_sweep_of_a_closed_streamer_raises(make, files):
    """For example when an LLM is closed while a stream of it is in use."""
    ended = []

    def go_on(sweep: Iterator[LayerView]) -> None:
        with pytest.raises(LinkError):
            next(sweep)
        ended.append(sweep)

    with bench(make, files) as b:
        held = b.streamer.sweep()
        next(held)
        b.streamer.close()
        for sweep in (held, b.streamer.sweep()):
            thread = threading.Thread(target=go_on, args=(sweep,), daemon=True)
            thread.start()
            thread.join(PATIENCE_S)
            assert sweep in ended, "the sweep waits for ever"


@every_bench
def test_interrupt_during_a_wait_leaves_the_next_sweep_complete(make, files, monkeypatch):
    is_waited_for = threading.Event()
    n_parts = itertools.count()

    def trap(i: int, n: int) -> None:
        if (i, n) == (3, 1) and next(n_parts) == 0:
            assert is_waited_for.wait(PATIENCE_S)
            time.sleep(0.02)  # until the sweep is deep in its wait
            _thread.interrupt_main()

    heed = handled(signal.SIGINT, signal.default_int_handler)
    with heed, bench(make, files, trap=trap) as b:
        with pytest.raises(KeyboardInterrupt), closing(b.streamer.sweep()) as sweep:
            for _ in sweep:
                is_waited_for.set()
        b.device.seen()
        b.sweep()


@every_bench
def test_meter_counts_each_device_copy_once(make, files):
    n_slots = 2
    n_sweeps = 6
    with bench(make, files, ("disk", "host", "device", "disk", "host", "disk"), n_slots) as b:
        for _ in range(n_sweeps):
            b.sweep()
        nbytes = b.streamer.meter.read()[0]
    layout = pack(stream_layers()[0]).layout  # all layers have the same
    least = n_sweeps * 5 * sum(slot.nbytes for slot in layout.entries)
    # Copies of the next pass may have been counted.
    most = (n_sweeps * 5 + n_slots) * layout.nbytes
    assert make is Host or least <= nbytes <= most


@every_bench
def test_set_sources_applies_from_the_next_sweep(make, files):
    """Streamed cache rows change their selection and order while old copies arrive."""
    with bench(make, files, late_s=0.001) as b:
        source = b.disk
        for order in ([0, 1, 2, 3, 4, 5], [3, 1], [5], [2, 2, 0, 4, 1]):
            tier = SimpleNamespace(
                n_parallel=source.n_parallel,
                layout=lambda i, order=order: source.layout(order[i]),
                reads=lambda i, into, order=order: source.reads(order[i], into),
            )
            b.streamer.set_sources(LayerSources(MemoryTier(), (tier,) * len(order), 3, 3))
            for _ in range(2):
                for block in b.streamer.sweep():
                    b.device.look(block)
                seen = b.device.seen()
                assert [got for _, got in seen] == [wanted(i) for i in order]


def test_copies_of_new_sources_wait_for_earlier_compute(files, monkeypatch):
    """Compute may still read the last slots of the old sources."""
    with bench(FakeGPU, files, ("host",) * N_LAYERS, 2) as b:
        b.sweep()
        waits = []
        note = lambda _, after: waits.append(after.result(PATIENCE_S))  # noqa: E731
        before_calls(monkeypatch, b.device.copies, "copy", note)
        b.streamer.set_sources(b.streamer._sources)
        b.sweep()
    assert len(waits) >= N_LAYERS and all(waits)


def test_gpu_copies_are_traced_by_events(files):
    trace = Mock(on=True)
    device = FakeGPU()
    sources, tiers = build_sources(device, ("host", "device", "host", "disk"), 2, files)
    started = time.perf_counter()
    streamer = CudaStreamer(sources, trace, device.copies)
    for block in streamer.sweep():
        device.look(block)
    for part in (streamer, device, *tiers.values()):
        part.close()
    spans = [call.args for call in trace.add.call_args_list]
    traced = {(lane.split(",")[0], name) for lane, name, _, _ in spans}
    assert traced >= {("link", f"layer {i}") for i in (0, 2, 3)} | {("disk", "layer 3")}
    assert ("link", "layer 1") not in traced
    assert all(started - 1 < a <= b < time.perf_counter() + 1 for *_, a, b in spans)


# The copy engine of a GPU serves the first ready copy and stays with a stream that has another one.
# A copy of another stream waits for one chunk if chunks alternate between streams in order.
@dataclass(eq=False)
class Copy:
    stream: "Stream"
    after: list["Copy"]


class Engine(TorchFunctionMode):
    """Record copies with their stream and the copies before them, and do them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = list[Copy]()
        self.stream: Stream | None = None
        self.n_timing = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_ and self.stream is not None:
            assert kwargs == {"non_blocking": True}
            self.copies.append(Copy(self.stream, self.stream.before))
            self.stream.before = self.copies[-1:]
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class Stream:
    def __init__(self) -> None:
        self.before = list[Copy]()  # copies that end before further work

    def wait_event(self, event: "Event") -> None:
        self.before = [*self.before, *event.after]


class Event:
    def __init__(self, engine: Engine, enable_timing: bool = False, blocking: bool = False) -> None:
        self.after = list[Copy]()
        self._engine = engine
        self._blocking = blocking
        engine.n_timing += enable_timing

    def record(self, stream: Stream) -> None:
        self.after = stream.before

    def synchronize(self) -> None:
        assert self._blocking, "a thread spins"
        assert self._engine.copies[-1] in self.after


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    with Engine() as made:
        monkeypatch.setattr(copy_device, "Stream", lambda device: Stream())
        monkeypatch.setattr(copy_device, "Event", lambda **how: Event(made, **how))
        monkeypatch.setattr(torch.cuda, "stream", made.on)
        yield made


def test_chunks_alternate_between_streams_in_order(engine):
    """Chunks of tensors of any length, after the event of their copy and all earlier chunks."""
    device = CopyDevice(torch.device("cuda"), 8)
    compute = Stream()
    with engine.on(compute):
        torch.zeros(1).copy_(torch.ones(1), non_blocking=True)
    done = Event(engine)
    done.record(compute)
    for after in (device.event(), done, device.event()):
        source = torch.randint(0, 256, (45,), dtype=torch.uint8)
        target = torch.zeros_like(source)
        n_copies, n_timing = len(engine.copies), engine.n_timing
        start, end = device.copy([(target[:3], source[:3]), (target[3:], source[3:])], after)
        assert torch.equal(target, source)
        first, *_, last = chunks = engine.copies[n_copies:]
        assert {*after.after} <= {*start.after} <= {*first.after} and end.after == [last]
        assert engine.n_timing == n_timing + 2, "timing events are of copies, not of chunks"
        assert all(a.stream is not b.stream for a, b in itertools.pairwise(chunks))
    assert len(engine.copies) == 1 + 3 * (1 + 6)
    assert all(a in b.after for a, b in itertools.pairwise(engine.copies[1:]))
    device.synchronize()
    device.wait(end)

"""A CUDA device simulated on the CPU.

FakeCudaTensor   a tensor in CPU memory that reports cuda:0 and refuses to mix with CPU tensors
fake_gpu         replaces torch.cuda, so that whole engines run on such tensors
FakeCopyDevice   the copy engine of streamers, immediate or asynchronous
record_graph     a stand-in for the capture of a CUDA graph

Errors of a real device are errors here: a tensor left on the host, a CPU generator for numbers of
the device, an array made from a tensor of the device.
"""

import ctypes
import functools
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload_rt.engine import builder, draft_spec, engine_spec
from offload_rt.offload.copy_device import CHUNK
from offload_rt.ops import cpu, extension, transfer
from support import emulated

PATIENCE_S = 30.0  # longer work hangs
DEVICE = torch.device("cuda", 0)
_GUARD = Path(__file__).with_name("cuda_guard.cpp")
_aten = torch.ops.aten
# Operations that accept tensors of both devices.
_MAY_MIX = {_aten.copy_.default, _aten._to_copy.default, _aten.index.Tensor,
    _aten.index_put_.default, _aten.index_put.default, _aten._index_put_impl_.default}  # fmt: skip
# Arguments that concern a device. Without them and without tensors there, a call is the CPU's.
_OF_DEVICES = {"device", "generator", "pin_memory"}
_GENERATORS: dict[int, torch.Generator] = {}  # of the device, by address


@dataclass
class Counts:
    """Calls on the device.

    n_waits    waits of the host for the device
    n_uploads  copies to the device, without those of streamers
    n_kernels  launches of kernels of csrc/
    selected   names of threads that selected the device
    """

    n_waits: int = 0
    n_uploads: int = 0
    n_kernels: int = 0
    selected: set[str] = field(default_factory=set)


_COUNTS = Counts()


class FakeCudaTensor(Tensor):
    """A tensor that reports device cuda:0; `inner` holds its values in CPU memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "FakeCudaTensor":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=DEVICE,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"FakeCudaTensor({self.inner!r})"


def _is_there(x: Any) -> bool:
    return isinstance(x, FakeCudaTensor)


class _Dispatch(TorchDispatchMode):
    """Wrap tensors created on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions that read devices before the dispatcher: attention and `torch.tensor`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            are_there = [*map(_is_there, tensors_of([args, *kwargs.values()]))]
            assert any(are_there) == all(are_there), "attention over two devices"
            if any(are_there):
                return FakeCudaTensor(_called(func, args, kwargs))
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, FakeCudaTensor) else value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    if type(value) not in (list, tuple):
        return change(value)
    return type(value)(_each(change, element) for element in value)


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*_each(_inner, args), **{name: _each(_inner, x) for name, x in kwargs.items()})


def _on_device(value: Any) -> Any:
    return _each(lambda part: FakeCudaTensor(part) if isinstance(part, Tensor) else part, value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [*tensors_of([args, *kwargs.values()])]
    has_fake = any(map(_is_there, tensors))
    if not has_fake and kwargs.keys().isdisjoint(_OF_DEVICES):
        return func(*args, **kwargs)
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted).type
    if has_fake and func not in _MAY_MIX:
        are_alike = all(_is_there(tensor) or tensor.dim() == 0 for tensor in tensors)
        assert are_alike, f"{func} takes tensors of two devices"
    _count(func, args, wanted, kwargs.get("non_blocking", False))
    on_device = wanted == "cuda" or (wanted is None and _is_there(tensors[0] if tensors else None))
    generator = kwargs.get("generator")
    is_alike = generator is None or (generator._cdata in _GENERATORS) == on_device
    assert is_alike, f"{func} draws with the other device's generator"
    changes = {} if wanted in (None, "meta") else {"device": torch.device("cpu")}
    changes |= {"pin_memory": False} if kwargs.get("pin_memory") else {}
    kwargs = kwargs | changes
    out = _called(func, args, kwargs)
    if func is _aten._to_copy.default and wanted is not None and on_device != _is_there(args[0]):
        out = out.clone() if out is args[0] else out
    if not on_device:
        return out
    name = func.overloadpacket._qualified_op_name
    # not for `__and__`
    if name.endswith("_") and not name.endswith("__") and _is_there(args[0]):
        return args[0]
    return _on_device(out)


def _count(func: Any, args: Any, wanted: str | None, is_async: bool) -> None:
    if func is _aten.copy_.default:
        to, source = map(_is_there, args[:2])
        is_async = is_async or args[2:3] == (True,)
    elif func is _aten._to_copy.default:
        source = _is_there(args[0])
        to = wanted == "cuda" or (wanted is None and source)
    elif func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default):
        to = _is_there(args[0])
        source = all(_is_there(index) for index in args[1] if index is not None)
    else:
        to, is_async = False, False
        source = func in _TO_THE_HOST and _is_there(args[0])
    _COUNTS.n_uploads += to and not source
    _COUNTS.n_waits += to != source and not is_async


_TO_THE_HOST = {_aten._local_scalar_dense.default, _aten.nonzero.default}


def _generator(device: torch.device | str = "cpu") -> torch.Generator:
    made = torch._C.Generator("cpu")
    if torch.device(device).type == "cuda":
        _GENERATORS[made._cdata] = made
    return made


@contextmanager
def fake_gpu(
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int = 4 << 30,
    pins: bool = True,
    has_kernels: bool = False,
    is_integrated: bool = False,
) -> Iterator[Counts]:
    """Simulate a CUDA device with `nbytes` of memory; yield the counts of calls.

    pins           whether the driver pins host memory
    has_kernels    whether the kernels of csrc/ are available, emulated on the CPU
    is_integrated  whether the device reports that it shares the host's memory
    """
    _set_guard()
    _COUNTS.n_waits = _COUNTS.n_uploads = _COUNTS.n_kernels = 0
    _COUNTS.selected.clear()
    kernels = _Kernels(emulated.load()) if has_kernels else None
    transfer._pending_reads.cache_clear()
    driver = SimpleNamespace(cudaHostRegister=lambda *_: not pins, cudaHostUnregister=lambda *_: 0)
    no_bus = {"pci_domain_id": 0xFFFF, "pci_bus_id": 0xFF, "pci_device_id": 0xFF}
    properties = SimpleNamespace(**no_bus, is_integrated=is_integrated)
    fractions = [1.0]
    for name, value in {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "set_device": _select,
        "mem_get_info": lambda device=None: (nbytes, nbytes),
        "get_device_capability": lambda device=None: (8, 9),
        "synchronize": lambda device=None: None,
        "get_device_properties": lambda device: properties,
        "current_stream": lambda device=None: SimpleNamespace(synchronize=_wait),
        "Event": _CountedEvent,
        "get_per_process_memory_fraction": lambda device=None: fractions[-1],
        "set_per_process_memory_fraction": lambda part, device=None: fractions.append(part),
        "cudart": lambda: driver,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(extension, "missing", lambda: "" if has_kernels else "the GPU is fake")
    monkeypatch.setattr(extension, "serves", lambda tensor: has_kernels and _is_there(tensor))
    monkeypatch.setattr(extension, "kernels", lambda: kernels)
    for module in (builder, draft_spec):
        monkeypatch.setattr(module, "CudaCapture", lambda: record_graph)
    # The fake GPU has no clock.
    monkeypatch.setattr(engine_spec, "_gpu_rates", lambda target: (25.0, 1000.0))
    monkeypatch.setattr(builder, "_CAPTURING_S", 0.0)  # passes on the fake GPU are slow
    monkeypatch.setattr("offload_rt.engine.loader.CopyDevice", lambda *_: FakeCopyDevice())
    monkeypatch.setattr(builder, "copy_chunk", lambda device: CHUNK)
    monkeypatch.setattr(torch, "Generator", _generator)
    # Wrapper tensors cannot be inference tensors.
    monkeypatch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())
    with _Dispatch(), _Functions():
        yield _COUNTS


def _select(device: Any) -> None:
    thread = threading.current_thread().name
    _COUNTS.selected.add(thread)
    if thread.startswith("engine"):  # modes apply to one thread, and end with it
        _Dispatch().__enter__()
        _Functions().__enter__()


def _wait() -> None:
    _COUNTS.n_waits += 1


class _CountedEvent:
    """An event in the past that counts waits."""

    def __init__(self, **_: bool) -> None:
        self.synchronize = _wait

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Kernels:
    """The emulated kernels for tensors of the device; two of them also take a host tensor."""

    def __init__(self, library: str) -> None:
        self._ops = getattr(torch.ops, library)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            n_of_host = sum(isinstance(x, Tensor) and not _is_there(x) for x in args)
            is_right = n_of_host == (name in ("transfer", "commit_rows"))
            assert is_right, f"{name} takes tensors of two devices"
            # a second kernel combines the parts
            _COUNTS.n_kernels += 2 if name == "tree_attention" else 1
            return _on_device(_called(getattr(self._ops, name), args, {}))

        return call


@functools.cache
def _set_guard() -> None:
    """Register a device guard that works without a device."""
    if torch.cuda.device_count():
        pytest.skip("the device needs its own guard")
    home = Path(torch.__file__).parent
    options = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(_GUARD)]
    options += [f"-L{home / 'lib'}", "-lc10", "-o"]
    ctypes.CDLL(str(emulated.built([_GUARD], lambda target: ["g++", *options, str(target)])))


class _Immediate(Executor):
    """Runs work when it is submitted."""

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(work(*args))
        return done


class FakeCopyDevice:
    """A `CopyDevice` with one stream for copies and one for compute, ordered by events alone.

    Streams are executors. Events are futures of their time.

    is_asynchronous  run both streams on threads, with random delays; else run all work at once
    wrap             type of the tensors of the device
    """

    def __init__(
        self, is_asynchronous: bool = False, wrap: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.n_copies = 0
        self.compute, self._copies = (
            ThreadPoolExecutor(1) if is_asynchronous else _Immediate() for _ in range(2)
        )
        self._wrap = wrap or FakeCudaTensor
        self._delays = random.Random(0) if is_asynchronous else None

    def delay(self) -> None:
        if self._delays is not None:
            time.sleep(self._delays.choice((0.0, 0.0, 0.002)))

    def close(self) -> None:
        self.compute.shutdown()
        self._copies.shutdown()

    def select(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_device(DEVICE)

    def allocate(self, nbytes: int) -> Tensor:
        return self._wrap(torch.full((nbytes,), 0xA5, dtype=torch.uint8))

    def event(self) -> Future[float]:
        return _Immediate().submit(float)

    def copy(
        self, moves: Sequence[tuple[Tensor, Tensor]], after: Future[float]
    ) -> tuple[Future[float], Future[float]]:
        self.n_copies += 1

        def start() -> float:
            after.result(PATIENCE_S)
            return time.perf_counter()

        def move() -> float:
            self.delay()
            for target, source in moves:
                _inner(target).copy_(source)
            return time.perf_counter()

        return self._copies.submit(start), self._copies.submit(move)

    def compute_waits_for(self, event: Future[float]) -> None:
        self.compute.submit(event.result, PATIENCE_S)

    def record_compute(self) -> Future[float]:
        return self.compute.submit(time.perf_counter)

    def wait(self, event: Future[float]) -> None:
        event.result(PATIENCE_S)

    def seconds_between(self, start: Future[float], end: Future[float]) -> float | None:
        return end.result() - start.result() if start.done() and end.done() else None

    def synchronize(self) -> None:
        self._copies.submit(float).result(PATIENCE_S)


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments or results, lists included.

    torch's tree_leaves would take most of the time of the fake GPU.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


class _Recording(TorchDispatchMode):
    """Records every call with its arguments and its result."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        assert func not in _TO_THE_HOST, f"{func} waits for the device while it is captured"
        if func in (_aten.copy_.default, _aten._to_copy.default):
            ends = {tensor.device.type for tensor in tensors_of(args)}
            ends |= {torch.device(kwargs["device"]).type} if kwargs.get("device") else set()
            is_possible = len(ends) == 1
            assert is_possible, f"{func} copies unpinned memory of the host while it is captured"
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


def record_graph(compute: Callable[[], None]) -> Callable[[], None]:
    """Compute once and return a function that repeats the calls on the same memory.

    Values that Python or numpy computed are fixed, as in a CUDA graph. Kernels of the CPU library
    bypass torch's dispatcher, so torch computes instead of them.
    """
    recording = _Recording()
    with recording, patch.object(cpu, "library", lambda: None):
        compute()

    @torch.inference_mode()
    def replay() -> None:
        for func, args, kwargs, out in recording.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tensors_of([out]), tensors_of([again]), strict=True):
                # A view shares memory that was computed again.
                if _address(old) != _address(new):
                    old.copy_(new)

    return replay


def _address(x: Tensor) -> int:
    return vars(x).get("inner", x).data_ptr()

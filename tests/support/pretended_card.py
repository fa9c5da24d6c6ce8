"""A CUDA device that is none: tensors that lie in CPU memory, say that they lie on a card, and mix
with no others.

What runs on it would run on a card as far as devices go: a tensor left on the host, a generator of
the host that is asked for numbers of the card, or an array made from a tensor of the card is an
error here as it is there. Copies and compute are done at once: their order is what the contract
tests of the streamers are about.
"""

import ctypes
import functools
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload_rt.engine import builder, draft_spec
from offload_rt.ops import extension, transfer
from support import emulated
from support.recorded import record, tensors_of

CARD = torch.device("cuda", 0)
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
_aten = torch.ops.aten
# What moves between devices, or takes indices from the host.
_MAY_MIX = {_aten.copy_.default, _aten._to_copy.default, _aten.index.Tensor,
    _aten.index_put_.default,
            _aten.index_put.default, _aten._index_put_impl_.default}  # fmt: skip
_GENERATORS: dict[int, torch.Generator] = {}  # of the card, by address


@dataclass
class Counts:
    """What happened on the card.

    n_waits    times that the host waited for it
    n_uploads  copies to it through the copy engine, but for those of the streamer
    n_kernels  launches of our own
    selected   names of the threads that have selected the card
    """

    n_waits: int = 0
    n_uploads: int = 0
    n_kernels: int = 0
    selected: set[str] = field(default_factory=set)


_COUNTS = Counts()


class CardTensor(Tensor):
    """A tensor that says it is on the card; `inner` holds its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CardTensor":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CARD,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"CardTensor({self.inner!r})"


class _Dispatch(TorchDispatchMode):
    """Tensors that are made on the card are card tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """What looks at devices before it comes to the dispatcher: attention picks its kernel,
    `torch.tensor` fills memory.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
            if any(isinstance(one, CardTensor) for one in tensors):
                assert all(isinstance(one, CardTensor) for one in tensors), (
                    "attention over two devices"
                )
                return CardTensor(_called(func, args, kwargs))
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).to(CARD)
        return func(*args, **kwargs)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, CardTensor) else value


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """A value changed, or each of those in a list or tuple."""
    return (
        type(value)(_each(change, one) for one in value)
        if type(value) in (list, tuple)
        else change(value)
    )


def _called(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a function gives for the values of card tensors."""
    return func(*_each(_inner, args), **{name: _each(_inner, one) for name, one in kwargs.items()})


def _on_card(value: Any) -> Any:
    return _each(lambda one: CardTensor(one) if isinstance(one, Tensor) else one, value)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [*tensors_of(args), *tensors_of(kwargs.values())]
    n_on_card = sum(isinstance(one, CardTensor) for one in tensors)
    wanted = kwargs.get("device")
    wanted = None if wanted is None else torch.device(wanted).type
    if n_on_card and func not in _MAY_MIX:
        strangers = [one for one in tensors if not isinstance(one, CardTensor) and one.dim() > 0]
        assert not strangers, f"{func} takes tensors of two devices"
    _count(func, args, wanted, kwargs.get("non_blocking", False))
    on_card = wanted == "cuda" or (wanted is None and isinstance(_first(tensors), CardTensor))
    generator = kwargs.get("generator")
    if generator is not None:
        assert (generator._cdata in _GENERATORS) == on_card, (
            f"{func} draws with the other device's generator"
        )
    if wanted not in (None, "meta"):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    out = _called(func, args, kwargs)
    if (
        func is _aten._to_copy.default
        and wanted is not None
        and on_card != isinstance(args[0], CardTensor)
    ):
        out = out.clone() if out is args[0] else out
    if not on_card:
        return out
    name = func.overloadpacket._qualified_op_name
    # not for `__and__`
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], CardTensor):
        return args[0]
    return _on_card(out)


def _count(func: Any, args: Any, wanted: str | None, is_async: bool) -> None:
    """What a call waits for, and what it copies to the card."""
    if func is _aten.copy_.default:
        to, source, is_async = (
            *(isinstance(one, CardTensor) for one in args[:2]),
            is_async or args[2:3] == (True,),
        )
    elif func is _aten._to_copy.default:
        to = wanted == "cuda"
        source = isinstance(args[0], CardTensor)
        to = to or (wanted is None and source)
    elif func in (_aten.index.Tensor, _aten.index_put_.default, _aten._index_put_impl_.default):
        places = [one for one in args[1] if one is not None]
        to = isinstance(args[0], CardTensor)
        source = all(isinstance(one, CardTensor) for one in places)
    else:
        to = False
        source = func in (_aten._local_scalar_dense.default, _aten.nonzero.default)
        source = source and isinstance(args[0], CardTensor)
        is_async = False
    _COUNTS.n_uploads += to and not source
    _COUNTS.n_waits += to != source and not is_async


def _first(tensors: list[Tensor]) -> Tensor | None:
    return tensors[0] if tensors else None


def _generator(device: torch.device | str = "cpu") -> torch.Generator:
    made = torch._C.Generator("cpu")
    if torch.device(device).type == "cuda":
        _GENERATORS[made._cdata] = made
    return made


@contextmanager
def pretended_card(
    monkeypatch: pytest.MonkeyPatch,
    nbytes: int = 4 << 30,
    pins: bool = True,
    has_kernels: bool = False,
) -> Iterator[Counts]:
    """A card of so much memory; gives what is counted on it.

    pins         whether its driver pins memory of the host
    has_kernels  whether those of csrc/ are built; they are emulated
    """
    _set_guard()
    _COUNTS.n_waits = _COUNTS.n_uploads = _COUNTS.n_kernels = 0
    _COUNTS.selected.clear()
    kernels = _Kernels(emulated.load()) if has_kernels else None
    transfer._pending_reads.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", _select)
    monkeypatch.setattr(
        extension, "missing", lambda: "" if has_kernels else "the card is pretended"
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (nbytes, nbytes))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    nowhere = SimpleNamespace(pci_domain_id=0xFFFF, pci_bus_id=0xFF, pci_device_id=0xFF)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: nowhere)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=_wait)
    )
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    fractions = [1.0]
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda device=None: fractions[-1]
    )
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda part, device=None: fractions.append(part),
    )
    for module in (builder, draft_spec):
        monkeypatch.setattr(module, "CudaCapture", lambda: record)
    monkeypatch.setattr(builder, "_CAPTURING_S", 0.0)  # passes of a pretended card take long
    monkeypatch.setattr(
        extension, "serves", lambda tensor: has_kernels and isinstance(tensor, CardTensor)
    )
    monkeypatch.setattr(extension, "kernels", lambda: kernels)
    monkeypatch.setattr(
        torch.cuda,
        "cudart",
        lambda: SimpleNamespace(
            cudaHostRegister=lambda *_: 0 if pins else 1, cudaHostUnregister=lambda *_: 0
        ),
    )
    monkeypatch.setattr("offload_rt.offload.stream_cuda.CopyDevice", lambda _: _Copies())
    monkeypatch.setattr(torch, "Generator", _generator)
    # A tensor that wraps another cannot be one of inference.
    monkeypatch.setattr(torch._C, "_InferenceMode", lambda mode: torch.no_grad())
    with _Dispatch(), _Functions():
        yield _COUNTS


def _select(device: Any) -> None:
    thread = threading.current_thread().name
    _COUNTS.selected.add(thread)
    if thread.startswith(
        "engine"
    ):  # modes apply to a single thread, and this thread ends with them
        _Dispatch().__enter__()
        _Functions().__enter__()


def _wait() -> None:
    _COUNTS.n_waits += 1


class _Event:
    """Has always happened, but whoever waits for it is counted."""

    def __init__(self, **_: bool) -> None:
        self.synchronize = _wait

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True


class _Kernels:
    """The emulated kernels, for tensors of the card; two of them also take one of the host."""

    def __init__(self, library: str) -> None:
        self._ops = getattr(torch.ops, library)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            tensors = [one for one in args if isinstance(one, Tensor)]
            n_of_host = sum(not isinstance(one, CardTensor) for one in tensors)
            assert n_of_host == (name in ("transfer", "commit_rows")), (
                f"{name} takes tensors of two devices"
            )
            # its parts are combined by a second one
            _COUNTS.n_kernels += 2 if name == "tree_attention" else 1
            return _on_card(_called(getattr(self._ops, name), args, {}))

        return call


@functools.cache
def _set_guard() -> None:
    """What torch asks which card is the current one; a build without CUDA has nobody to ask."""
    if torch.version.cuda is not None:
        pytest.skip("a build of torch with CUDA has a guard of its own")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    home = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "guard.cpp").write_text(_GUARD)
        library = Path(folder) / "guard.so"
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}",
                str(Path(folder) / "guard.cpp"),
             f"-L{home / 'lib'}", "-lc10", "-o", str(library)],
            check=True,
        )  # fmt: skip
        ctypes.CDLL(str(library))


class _Copies:
    """A `CopyDevice` that copies at once."""

    def select(self) -> None:
        torch.cuda.set_device(CARD)

    def allocate(self, nbytes: int) -> Tensor:
        return CardTensor(torch.full((nbytes,), 0xA5, dtype=torch.uint8))

    def event(self) -> None:
        return None

    def copy(self, moves: Sequence[tuple[Tensor, Tensor]], after: None) -> tuple[float, float]:
        started = time.perf_counter()
        for target, source in moves:
            _inner(target).copy_(source)
        return started, time.perf_counter()

    def compute_waits_for(self, event: float) -> None:
        pass

    def record_compute(self) -> float:
        return time.perf_counter()

    def wait(self, event: float) -> None:
        pass

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass

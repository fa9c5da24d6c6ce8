"""The kernels of csrc/, emulated on the CPU and on a device if available."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import emulated

from offload_rt.ops import cpu, extension


@dataclass(frozen=True)
class Kernels:
    """The ops of a kernel library by name, and the device of their tensors."""

    library: str
    device: str

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self.library), name)

    def check_schema(self, name: str, args: Any) -> None:
        torch.library.opcheck(getattr(self, name).default, args, test_utils="test_schema")


@pytest.fixture(scope="module", params=["emulated", pytest.param("card", marks=pytest.mark.cuda)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "emulated":
        return Kernels(emulated.load(), "cpu")
    if extension.missing():
        pytest.skip("no card, or the kernels are not built for one")
    return Kernels("offload_rt", "cuda")


@pytest.fixture(params=range(4), ids=("portable", "avx2", "avx512", "avx512bf16"))
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """An instruction set that this machine has."""
    if request.param > cpu.level():
        pytest.skip("this CPU has no such instructions")
    monkeypatch.setattr(cpu, "level", lambda: request.param)
    return int(request.param)

"""The kernels of csrc/, emulated on the CPU and on a device if available."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support import emulated

from offload_rt.ops import extension


@dataclass(frozen=True)
class Kernels:
    """The ops of a kernel library by name, and the device of their tensors."""

    library: str
    device: str

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(torch.ops, self.library), name)

    def opcheck(self, name: str, args: Any) -> None:
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(getattr(self, name).default, args, test_utils=checks)


@pytest.fixture(scope="module", params=["emulated", pytest.param("card", marks=pytest.mark.cuda)])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "emulated":
        return Kernels(emulated.load(), "cpu")
    if extension.missing():
        pytest.skip("no card, or the kernels are not built for one")
    return Kernels("offload_rt", "cuda")

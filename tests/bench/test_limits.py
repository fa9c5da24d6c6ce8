"""Least cycles of counted instructions."""

import ctypes
import shutil
from collections import Counter
from pathlib import Path

import pytest

from bench.compute.limits import count_instructions, least_cycles
from offload_rt.ops import cpu


def test_the_scarcest_resource_limits():
    for counts, cycles in (
        ({"vdpbf16ps %zmm1,%zmm2,%zmm3": 6}, 6),
        ({"vmulps %ymm1,%ymm2,%ymm3": 6}, 3),
        # Pipes 1 and 2, 2 and 3: three pipes for eight halves.
        ({"vpermw %zmm1,%zmm2,%zmm3": 2, "vpsrlw $0x4,%zmm1,%zmm2": 2}, 8 / 3),
        ({"vmovups 0x40(%rax),%zmm1": 5}, 5),
        ({"vmulps (%rax){1to16},%zmm1,%zmm2": 4, "vmovups %zmm1,(%rax)": 9}, 4),
        ({"add $0x40,%rax": 12}, 2),
    ):
        assert least_cycles(Counter(counts)) == pytest.approx(cycles)


@pytest.mark.skipif(
    cpu.level() == 0 or shutil.which("objdump") is None, reason="needs FMA, objdump"
)
def test_executed_instructions_are_counted():
    library = cpu.library()

    def multiply() -> None:
        library.offload_rt_fma_rate(50, ctypes.byref(ctypes.c_double()))

    counts = count_instructions(Path(library._name), multiply)
    assert sum(n for text, n in counts.items() if text.startswith("vfmadd")) == 10 * 50

"""Contract of weights/: the numbers of a layer in one flat block, in every format."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantize import Choice, config_of
from support.checkpoints import pack

from offload_rt.dtypes import DType
from offload_rt.system import registry
from offload_rt.weights.formats import format_of
from offload_rt.weights.gguf import Storage
from offload_rt.weights.layout import ALIGNMENT, PAGE, host_block, packed_layout


def test_host_block_is_in_huge_pages_and_not_inherited_by_child_processes():
    """Flags of its mapping: "hg" for huge pages, "dc": do not copy on fork.

    Shared memory is in huge pages only where the system's owner has said so.
    """
    for nbytes in (0, 1, 4095, 4096):
        block = host_block(nbytes)
        assert block.shape == (nbytes,) and int(block.fill_(7).sum()) == 7 * nbytes
    block = host_block(16 << 20)
    assert block.data_ptr() % PAGE == 0
    text = Path("/proc/self/smaps").read_text()
    for part in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        addresses, permissions = part.split(" ", 2)[:2]
        start, end = (int(address, 16) for address in addresses.split("-"))
        if start <= block.data_ptr() < end:
            flags = part[part.index("VmFlags:") :].split()
            assert permissions == "rw-p" and {"dc", "hg"} <= set(flags)
            return
    pytest.fail("no mapping contains the block")


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=8)


@given(TENSORS)
@settings(deadline=None, max_examples=50)
def test_packed_slots_are_aligned_and_disjoint(shapes):
    layout = packed_layout(
        (f"t{n}", shape, DType.from_torch(dtype)) for n, (shape, dtype) in enumerate(shapes)
    )
    assert [(slot.shape, slot.dtype.torch) for slot in layout.entries] == shapes
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.entries)
    assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(layout.entries))
    assert layout.entries[-1].offset + layout.entries[-1].nbytes <= layout.nbytes


def test_adjacent_tensors_are_merged():
    """In their order, of one dtype and width, without a gap."""
    shapes = {"a": (64, 4), "b": (32, 4), "c": (3, 4), "d": (64, 4), "e": (64, 2)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    packed = pack(tensors | {"f": torch.ones(64, 2).bfloat16()})
    for names in ("ab", "abc", "b", "bc"):
        entry = packed.layout.fused(names)
        assert entry is not None
        assert torch.equal(entry.view(packed.block), torch.cat([tensors[name] for name in names]))
    for names in ("ba", "ac", "cd", "de", "ef", "ax"):
        assert packed.layout.fused(names) is None


CONFIGS = {
    "dense": None,
    "compressed_tensors": config_of(Choice("pack-quantized", group_size=4)),
    "fp8": config_of(Choice("fp8", group_size=4)),
    "awq": config_of(Choice("awq", group_size=4)),
    "gptq": config_of(Choice("gptq", group_size=4)),
    "bitsandbytes": config_of(Choice("nf4")),
    "mxfp4": {"quant_method": "mxfp4"},
    "gguf": Storage(None),
}


def test_every_format_matches_its_config():
    names = set(registry.names("weights.formats"))
    assert names == set(CONFIGS), "say here which config a new format matches"
    for name, config in CONFIGS.items():
        modules = {name: registry.find("weights.formats", name) for name in CONFIGS}
        assert [name for name, module in modules.items() if module.matches(config)] == [name]
        assert format_of(config).name == name

"""What every file in weights/ promises: the numbers of a layer, used out of one flat block."""

import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F
from checkpoints import raw_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload_rt.system import registry
from offload_rt.weights.layout import ALIGNMENT, PAGE, align_up, host_block, pack, packed_layout, repack

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TENSORS = st.lists(
    st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.sampled_from(DTYPES)),
    min_size=1,
    max_size=8,
)


def _tensors(shapes: list[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    return {f"t{n}": torch.randn(shape).to(dtype) for n, (shape, dtype) in enumerate(shapes)}


@given(TENSORS)
@settings(deadline=None, max_examples=50)
def test_packed_slots_are_aligned_and_lie_apart_in_their_block(shapes: list) -> None:
    layout = packed_layout((f"t{n}", shape, dtype) for n, (shape, dtype) in enumerate(shapes))
    assert [(slot.shape, slot.dtype) for slot in layout.entries] == shapes
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.entries)
    assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(layout.entries))
    assert layout.entries[-1].offset + layout.entries[-1].nbytes <= layout.nbytes


@given(TENSORS)
@settings(deadline=None, max_examples=50)
def test_packing_and_repacking_keep_every_byte(shapes: list) -> None:
    tensors = _tensors(shapes)
    for image in (pack(tensors), repack(pack(tensors))):
        views = image.layout.views(image.block)
        assert list(views) == list(tensors)
        assert all(raw_bytes(views[name]) == raw_bytes(tensor) for name, tensor in tensors.items())
        assert all(
            view.untyped_storage().data_ptr() == image.block.untyped_storage().data_ptr() for view in views.values()
        )


def test_packing_copies() -> None:
    tensor = torch.ones(4)
    image = pack({"t": tensor})
    tensor.zero_()
    assert image.layout.views(image.block)["t"].tolist() == [1.0] * 4


@given(st.integers(0, 2**50), st.sampled_from([1, 2, 256, 4096]))
def test_aligning_up_gives_the_least_multiple_that_is_enough(nbytes: int, alignment: int) -> None:
    up = align_up(nbytes, alignment)
    assert up % alignment == 0
    assert 0 <= up - nbytes < alignment


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5 << 20])
def test_a_host_block_begins_on_a_page_and_can_be_written_to_its_end(nbytes: int) -> None:
    block = host_block(nbytes)
    assert block.dtype == torch.uint8
    assert block.shape == (nbytes,)
    assert nbytes == 0 or block.data_ptr() % PAGE == 0
    block.fill_(7)
    assert int(block.sum()) == 7 * nbytes


@pytest.mark.parametrize("name", registry.names("weights.formats"))
def test_a_format_has_a_view_of_a_layer(name: str) -> None:
    view = registry.find("weights.formats", name).View
    assert list(inspect.signature(view).parameters) == ["layout", "block", "dtype"]
    assert all(callable(getattr(view, method, None)) for method in ("vector", "linear"))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("computed_in", DTYPES)
@pytest.mark.parametrize("stored_in", DTYPES)
@pytest.mark.parametrize("name", registry.names("weights.formats"))
def test_a_view_computes_with_the_numbers_that_were_packed(
    name: str, stored_in: torch.dtype, computed_in: torch.dtype, with_bias: bool
) -> None:
    """Bit for bit. A format that codes its blocks must say here how its block is made of plain tensors."""
    tensors = {"first.weight": torch.randn(7, 5), "second.weight": torch.randn(5, 7), "norm.weight": torch.randn(5)}
    tensors |= {"first.bias": torch.randn(7)} if with_bias else {}
    tensors = {key: tensor.to(stored_in) for key, tensor in tensors.items()}
    image = pack(tensors)
    view = registry.find("weights.formats", name).View(image.layout, image.block, computed_in)
    x = torch.randn(3, 5).to(computed_in)
    bias = tensors["first.bias"].to(computed_in) if with_bias else None
    h = view.linear(x, "first")
    assert h.dtype == computed_in
    assert torch.equal(h, F.linear(x, tensors["first.weight"].to(computed_in), bias))
    assert torch.equal(view.linear(h, "second"), F.linear(h, tensors["second.weight"].to(computed_in)))
    assert torch.equal(view.vector("norm"), tensors["norm.weight"].to(computed_in))
    assert view.vector("norm").dtype == computed_in


@pytest.mark.parametrize("stored_in", DTYPES)
def test_the_rows_of_a_table_are_those_asked_for(stored_in: torch.dtype) -> None:
    table = torch.randn(11, 4).to(stored_in)
    image = pack({"table.weight": table})
    ids = torch.tensor([3, 0, 10, 3])
    rows = registry.find("weights.formats", "dense").View(image.layout, image.block, torch.float32).rows(ids, "table")
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table[ids].float())


def test_a_view_follows_its_block() -> None:
    """A slot is refilled under the same view only between sweeps; the view itself never copies."""
    image = pack({"m.weight": torch.ones(2, 2)})
    view = registry.find("weights.formats", "dense").View(image.layout, image.block, torch.float32)
    image.block.zero_()
    assert view.linear(torch.ones(1, 2), "m").tolist() == [[0.0, 0.0]]

"""Kernels between the products of a layer on a CPU: right, and the same bits for any batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
from support.tiny import random_tree
from torch import Tensor

from offload_rt import ops
from offload_rt.ops import cpu, layer_cpu, reference
from offload_rt.ops.tree_mask import TreeMask, make_tree_mask
from offload_rt.tree.topology import Topology

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# What an output of size one may be off: weights of bfloat16 are rounded, too, where instructions
# for them are used.
ATOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
pytestmark = [
    pytest.mark.numeric,
    pytest.mark.usefixtures("level"),
    pytest.mark.skipif(cpu.library() is None, reason="no C++ compiler"),
]


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """Queries of tree nodes, and keys and values of `n_before` tokens and of these nodes."""

    q: Tensor
    k: Tensor
    v: Tensor
    tree: Topology
    n_before: int
    window: int | None
    softcap: float | None

    @classmethod
    def random(cls, seed: int, dtype: torch.dtype) -> "Case":
        generator = np.random.default_rng(seed)
        n, n_before, n_groups = (
            int(generator.integers(*limits)) for limits in ((1, 50), (0, 300), (1, 3))
        )
        heads = n_groups * int(generator.choice([1, 2, 3, 4, 7, 8]))
        dim = 2 * int(generator.integers(1, 70))
        v_dim = dim if seed % 3 else int(generator.integers(1, 140))
        torch.manual_seed(seed)
        q = 2 * torch.randn(n, heads, dim).to(dtype)
        k, v = (torch.randn(n_groups, n_before + n, width).to(dtype) for width in (dim, v_dim))
        window = None if seed % 2 else int(generator.integers(1, 300))
        tree = random_tree(n, seed, reach=int(generator.integers(1, 9)))
        return cls(q, k, v, tree, n_before, window, 3.0 if seed % 5 == 0 else None)

    def attend(
        self, n_threads: int = 1, rows: range | None = None, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of some nodes, computed together."""
        rows = rows or range(len(self.q))
        mask = self.tree.mask(rows.start, rows.stop, self.n_before).within(self.window)
        k, v = (x[:, : self.n_before + rows.stop] for x in (self.k, self.v))
        with threads(n_threads):
            return self.of(self.q[rows.start : rows.stop], k, v, mask, sinks)

    def of(
        self, q: Tensor, k: Tensor, v: Tensor, mask: TreeMask, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        scale = self.q.shape[2] ** -0.5
        return layer_cpu.tree_attention(q, k, v, mask, scale, self.softcap, sinks)

    def path(self, node: int) -> list[int]:
        """Places of the keys of a node's path in order."""
        path = [0, *self.tree.path_to(node)]
        return [*range(self.n_before), *(self.n_before + node for node in path)]

    def decoded(self, node: int) -> tuple[Tensor, Tensor]:
        """Compute a node as plain decoding does: one row after the keys of its path in order."""
        places = self.path(node)
        mask = make_tree_mask(np.array([-1]), 0, len(places) - 1).within(self.window)
        q = self.q[node : node + 1]
        return self.of(q, self.k[:, places], self.v[:, places], mask)


def exact(case: Case) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64, node by node and key by key."""
    q, k, v = (x.double() for x in (case.q, case.k, case.v))
    heads = q.shape[1] // len(k)
    outs = []
    sums = []
    for node in range(len(q)):
        places = case.path(node)[-(case.window or 1 << 30) :]
        keys, values = (x[:, places].repeat_interleave(heads, 0) for x in (k, v))
        scores = torch.einsum("hd,hkd->hk", q[node], keys) * q.shape[2] ** -0.5
        scores = scores if case.softcap is None else case.softcap * (scores / case.softcap).tanh()
        outs.append(torch.einsum("hk,hkd->hd", scores.softmax(-1), values))
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


def assert_near(got: Tensor, expected: Tensor, off: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), expected, atol=off, rtol=off)


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_equals_float64(dtype, monkeypatch):
    """Sinks take a share of the output, and are not part of the log-sum-exp.

    Without the library, as many rows at once as fit.
    """
    for seed in range(6):
        case = Case.random(seed, dtype)
        expected, expected_lse = exact(case)
        n_heads = case.q.shape[1]
        mask = case.tree.mask(0, len(case.q), case.n_before).within(case.window)
        for sinks in (None, torch.randn(n_heads), torch.full((n_heads,), 60.0)):
            out, lse = case.attend(1 + seed % 2, sinks=sinks)
            share = 1 if sinks is None else (expected_lse - sinks).sigmoid()[..., None]
            assert_near(out, expected * share, ATOL[dtype])
            assert_near(lse, expected_lse)
            with monkeypatch.context() as patch:
                patch.setattr(layer_cpu, "attends", lambda *_: False)
                patch.setattr(reference, "MAX_SCORES", seed % 2 << 20)
                scale = case.q.shape[2] ** -0.5
                out = ops.tree_attention(case.q, case.k, case.v, mask, scale, case.softcap, sinks)
            assert_near(out, expected * share, ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_attention_equals_plain_decoding_bit_for_bit(dtype):
    for seed in range(6):
        case = Case.random(seed, dtype)
        out, lse = case.attend(1 + seed % 2)
        for node in {0, *range(seed % 3, len(case.q), 3), len(case.q) - 1}:
            with threads(2 - seed % 2):
                decoded = case.decoded(node)
            assert_same((out[node : node + 1], lse[node : node + 1]), decoded)


@pytest.mark.parametrize(("dtype", "window"), zip(DTYPES, (None, 40, 129), strict=True))
def test_chunked_prompt_attention_equals_whole_bit_for_bit(dtype, window):
    n = 300
    q, k, v = 2 * torch.randn(n, 4, 32), *torch.randn(2, 2, n, 32)
    parts = (x.to(dtype) for x in (q, k, v))
    case = Case(*parts, Topology.chain(n), 0, window, None)
    whole = case.attend()
    for size in (1, 64, 131):
        parts = [case.attend(2, range(first, min(first + size, n))) for first in range(0, n, size)]
        assert_same([torch.cat(part) for part in zip(*parts, strict=True)], whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_invisible_rows_are_not_read(dtype, poison):
    """Poison all keys and values except those of a node's path and window."""
    for seed in range(4):
        case = Case.random(seed, dtype)
        expected = case.attend()
        mask = case.tree.mask(0, len(case.q), case.n_before).within(case.window)
        for node in {0, len(case.q) // 2, len(case.q) - 1}:
            hidden = torch.ones(case.k.shape[1], dtype=torch.bool)
            hidden[case.path(node)[-(case.window or 1 << 30) :]] = False
            k, v = (x.masked_fill(hidden[None, :, None], poison) for x in (case.k, case.v))
            got = case.of(case.q, k, v, mask)
            assert_same([part[node] for part in got], [part[node] for part in expected])
    case = Case.random(1, dtype)
    case.k[:, 0] = math.nan  # visible to all
    assert case.attend()[0].isnan().all()


def test_threads_share_many_keys_of_a_few_heads():
    tree = Topology(np.array([-1, 0, 0]))
    for dtype in DTYPES:
        parts = (x.to(dtype) for x in (torch.randn(3, 2, 64), *torch.randn(2, 1, 3003, 64)))
        case = Case(*parts, tree, 3000, None, None)
        assert_same(case.attend(1), case.attend(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 9, 30])
@pytest.mark.parametrize("attends", [layer_cpu.attends, lambda *_: False], ids=("cpu", "torch"))
def test_parts_of_the_keys_merge_to_all(dtype, window, attends, monkeypatch):
    """Keys and values are interleaved like offloaded rows.

    A row may see no key of two parts, or the last keys of a part before the tree.
    """
    monkeypatch.setattr(layer_cpu, "attends", attends)
    n, n_before, dim = 12, 50, 24
    q = torch.randn(n, 6, dim).to(dtype)
    keys, values = torch.randn(n_before + n, 2, 3, dim).to(dtype).permute(1, 2, 0, 3)
    mask = random_tree(n, 3, reach=3).mask(0, n, n_before).within(window)
    joined = None
    for first, stop in ((0, 17), (17, 40), (40, n_before + n)):
        part = ops.partial_attention(
            q, keys[:, first:stop], values[:, first:stop], mask.part(first, stop), 0.2
        )
        joined = part if joined is None else ops.merge(*joined, *part)
    exact = (x.double() for x in (q, keys, values))
    expected, expected_lse = reference.partial_attention(*exact, mask.dense(), 0.2)
    assert_near(joined[0], expected, ATOL[dtype])
    assert_near(joined[1], expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 12, 64, 96])
def test_rotary_embedding_equals_the_reference_bit_for_bit(dtype, dim):
    """With strided inputs, narrower values, and rows in the middle of a longer cache."""
    torch.manual_seed(dim)
    n, first = 30, 5
    mixed = torch.randn(n, 8, dim).to(dtype)
    q, k = mixed[:, :6], mixed[:, 6:]
    v = torch.randn(n, 2, dim + 4)[..., : dim // 2].to(dtype)
    rotary = tuple(torch.randn(n, dim).to(dtype) for _ in range(2))
    caches = [[torch.ones(2, n + 9, x.shape[2], dtype=dtype) for x in (k, v)] for _ in range(2)]
    rows = slice(first, first + n)
    expected = reference.rotate_and_store(q, k, v, rotary, *caches[0], rows)
    rotated = layer_cpu.rotate_and_store(q, k, v, rotary, *caches[1], first)
    assert_same([rotated, *caches[1]], [expected, *caches[0]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 5, 40, 64, 301])
def test_norms_and_gates_do_not_depend_on_the_batch(dtype, dim):
    """In rows of a wider tensor, too, and close to the plain reference."""
    n = 300
    wide = (3 * torch.randn(n, 2 * dim)).to(dtype)
    x, up = wide[:, :dim], wide[:, dim:]
    delta = torch.randn(n, dim).to(dtype)
    weight = torch.randn(dim).to(dtype)
    added = x + delta

    heads = wide.view(n, 2, dim)
    norm = partial(layer_cpu.rms_norm, weight=weight, eps=1e-5)
    for way, expected in (
        (lambda at: norm(x[at]), reference.rms_norm(x, weight, 1e-5)),
        (lambda at: norm(heads[at]), reference.rms_norm(heads, weight, 1e-5)),
        (lambda at: norm(x[at].clone(), delta=delta[at]), reference.rms_norm(added, weight, 1e-5)),
        (lambda at: layer_cpu.silu_mul(x[at], up[at]), reference.silu_mul(x, up)),
    ):
        with threads(2):
            whole = way(slice(None))
        for size in (1, 7, 64):
            with threads(1):
                parts = [way(slice(first, first + size)) for first in range(0, n, size)]
            assert_same([torch.cat(parts)], [whole])
        rounding = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(whole, expected, atol=rounding, rtol=rounding)
    changed = x.clone()
    norm(changed, delta=delta)
    assert torch.equal(changed, added)


def test_gates_of_extreme_numbers():
    numbers = [-math.inf, -1e4, -100.0, -88.5, -1e-30, 0.0, 88.5, 1e4, math.inf, math.nan]
    gate = torch.tensor([numbers])
    got = layer_cpu.silu_mul(gate, torch.ones_like(gate))
    expected = gate * gate.double().sigmoid().float()
    torch.testing.assert_close(got, expected, atol=1e-30, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "k"), [(1, 1), (7, 7), (33, 4), (1000, 32), (5000, 8)])
def test_most_probable_tokens_equal_those_of_torch(dtype, width, k):
    """Of equal logits the first comes first; rows are parts of a wider tensor."""
    logits = 4 * torch.randn(5, width + 3, generator=torch.Generator().manual_seed(width))
    logits = logits.to(dtype)[:, :width]
    logits[1] = logits[1].round()  # equal ones
    logits[2, width // 2 + 1 :] = -math.inf
    wide = logits.float()
    for temperature in (None, 1.0, 0.3, 1e-40):
        values, found = layer_cpu.top(logits, k, temperature)
        expected = reference.top(logits, k, temperature)[0]
        torch.testing.assert_close(values, expected, rtol=2e-5, atol=1e-37)
        torch.testing.assert_close(wide.gather(1, found), wide.topk(k).values)
        assert all(len(set(row)) == k for row in found.tolist())
        assert found[1, 0] == wide[1].numpy().argmax()


def test_most_probable_tokens_have_no_denormal_probability():
    """e^-86.9 is a normal number; a third of it is not."""
    logits = torch.tensor([[0.0, -86.9, 0.0, -80.0, 0.0]])
    probs, tokens = layer_cpu.top(logits, 5, 1.0)
    assert tokens.tolist() == [[0, 2, 4, 3, 1]]
    assert probs[0, 3] > 0 == probs[0, 4]


@pytest.mark.parametrize("place", [0, 200, 4999])
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_most_probable_token_reveals_nan_and_infinity(place, number):
    logits = torch.randn(2, 5000)
    logits[1, place] = number
    for k in (1, 8):
        values, _ = layer_cpu.top(logits, k)
        assert values[:, 0].isfinite().tolist() == [True, False]

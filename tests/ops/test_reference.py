"""Plain references of attention equal the definition in float64."""

import itertools

import pytest
import torch
from support.tiny import random_tree

from offload_rt import ops
from offload_rt.ops import layer_cpu, reference

pytestmark = pytest.mark.numeric


def exact(q, k, v, visible=None, softcap=None, sinks=None):
    """Outputs and log-sum-exps in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // len(x), 0) for x in (k, v))
    scores = torch.einsum("nhd,hkd->nhk", q, k) * 0.125
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    share = 1 if sinks is None else (lse - sinks).sigmoid()[..., None]
    return torch.einsum("nhk,hkd->nhd", scores.softmax(-1), v) * share, lse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "n", "n_keys"),
    [(8, 2, 1, 1), (8, 2, 1, 37), (8, 8, 1, 37), (6, 1, 1, 300), (8, 1, 5, 23), (8, 2, 5, 23)],
)
def test_attention_equals_float64(dtype, heads, groups, n, n_keys):
    """Of a row that sees all keys, and of several rows."""
    draw = torch.Generator().manual_seed(n_keys)
    q = 3 * torch.randn(n, heads, 64, generator=draw).to(dtype)
    k, v = (torch.randn(groups, n_keys, 64, generator=draw).to(dtype) for _ in range(2))
    visible = None if n == 1 else torch.rand(n, n_keys, generator=draw) < 0.5
    got = reference.tree_attention(q, k, v, visible, 0.125)
    assert (got.dtype, got.shape) == (dtype, q.shape)
    rounding = max(2 * torch.finfo(dtype).eps, 1e-5)
    expected, _ = exact(q, k, v, visible)
    torch.testing.assert_close(got.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (6, 1)])
def test_parts_of_the_keys_merge_to_the_whole(dtype, heads, groups):
    """Three parts in any order; rows that see nothing of one part, of two, and of all."""
    draw = torch.Generator().manual_seed(heads)
    q = 30 * torch.randn(5, heads, 64, generator=draw).to(dtype)
    k, v = (torch.randn(groups, 40, 64, generator=draw).to(dtype) for _ in range(2))
    visible = torch.rand(5, 40, generator=draw) < 0.5
    visible[0, :10] = visible[1, 10:] = visible[2] = False
    seen = visible.any(1)
    expected, sums = exact(q, k, v, visible)
    parts = [
        reference.partial_attention(q, k[:, at], v[:, at], visible[:, at], 0.125)
        for at in (slice(0, 10), slice(10, 39), slice(39, 40))
    ]
    for a, b, c in itertools.permutations(parts):
        out, lse = ops.merge(*ops.merge(*a, *b), *c)
        assert out.dtype == dtype and not out[~seen].any() and (lse[~seen] == -torch.inf).all()
        error = max(4 * torch.finfo(dtype).eps, 1e-5 if dtype != torch.float64 else 1e-12)
        torch.testing.assert_close(out[seen].double(), expected[seen], atol=error, rtol=error)
        torch.testing.assert_close(lse[seen].double(), sums[seen], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(("softcap", "has_sinks"), [(None, True), (3.0, False), (3.0, True)])
@pytest.mark.parametrize("most", [1, 1 << 20])
def test_softcap_and_sinks_equal_the_definition(softcap, has_sinks, most, monkeypatch):
    """As many rows at once as fit. Values are narrower than keys."""
    monkeypatch.setattr(reference, "MAX_SCORES", most)
    monkeypatch.setattr(layer_cpu, "attends", lambda *_: False)
    q = 16 * torch.randn(6, 4, 8)
    k, v = (torch.randn(2, 15, width) for width in (8, 5))
    sinks = torch.randn(4) if has_sinks else None
    mask = random_tree(6, seed=1).mask(0, 6, 9)
    got = ops.tree_attention(q, k, v, mask, 0.125, softcap, sinks)
    expected, _ = exact(q, k, v, mask.dense(), softcap, sinks)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)

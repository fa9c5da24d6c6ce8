"""Alternative ways of the plain references give equal results."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from offload_rt import ops
from offload_rt.ops import reference

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "groups", "n_keys"), [(8, 2, 1), (8, 2, 37), (8, 8, 37), (6, 1, 300)]
)
def test_single_row_attention_equals_many_rows(dtype, heads, groups, n_keys):
    generator = torch.Generator().manual_seed(n_keys)
    q = 3 * torch.randn(1, heads, 64, generator=generator).to(dtype)
    k, v = (torch.randn(groups, n_keys, 64, generator=generator).to(dtype) for _ in range(2))
    got = reference.tree_attention(q, k, v, None, 0.125)
    k, v = (x.double().repeat_interleave(heads // groups, dim=0) for x in (k, v))
    weights = torch.softmax(torch.einsum("nhd,hkd->hnk", q.double(), k) * 0.125, dim=-1)
    expected = torch.einsum("hnk,hkd->nhd", weights, v)
    assert (got.dtype, got.shape) == (dtype, q.shape)
    rounding = max(2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(got.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "groups"), [(8, 2), (4, 4), (6, 1)])
def test_parts_of_the_keys_merge_to_the_whole(dtype, heads, groups):
    """Three parts in any order; rows that see nothing of one part, of two, and of all."""
    generator = torch.Generator().manual_seed(heads)
    q = 30 * torch.randn(5, heads, 64, generator=generator).to(dtype)
    k, v = (torch.randn(groups, 40, 64, generator=generator).to(dtype) for _ in range(2))
    visible = torch.rand(5, 40, generator=generator) < 0.5
    visible[0, :10] = visible[1, 10:] = visible[2] = False
    seen = visible.any(1)
    exact = [x.double() for x in (q, k, v)]
    expected = reference.tree_attention(*exact, visible, 0.125)
    keys = exact[1].repeat_interleave(heads // groups, 0)
    scores = torch.einsum("nhd,hkd->nhk", exact[0], keys) * 0.125
    sums = scores.masked_fill(~visible[:, None], -torch.inf).logsumexp(-1)
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


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_grouped_heads_equal_rows_of_a_head(groups):
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(5, 8, 64, generator=generator)
    k, v = (torch.randn(groups, 23, 64, generator=generator) for _ in range(2))
    visible = torch.rand(5, 23, generator=generator) < 0.5
    visible[:, 0] = True
    tensors = q.transpose(0, 1)[None], k[None], v[None], visible
    expected = F.scaled_dot_product_attention(*tensors, scale=0.125, enable_gqa=True)
    got = reference.tree_attention(q, k, v, visible, 0.125)
    torch.testing.assert_close(got, expected[0].transpose(0, 1))

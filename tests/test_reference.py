"""What the plain references do in several ways is the same in all of them."""

import pytest
import torch

from offload_rt import ops
from offload_rt.ops import reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "n_keys"), [(8, 2, 1), (8, 2, 37), (8, 8, 37), (6, 1, 300)])
def test_one_row_attends_as_many_do(dtype: torch.dtype, heads: int, groups: int, n_keys: int) -> None:
    generator = torch.Generator().manual_seed(n_keys)
    q = 3 * torch.randn(1, heads, 64, generator=generator).to(dtype)
    k, v = (torch.randn(groups, n_keys, 64, generator=generator).to(dtype) for _ in range(2))
    got = ops.tree_attention(q, k, v, None, 0.125)
    k, v = (x.double().repeat_interleave(heads // groups, dim=0) for x in (k, v))
    weights = torch.softmax(torch.einsum("nhd,hkd->hnk", q.double(), k) * 0.125, dim=-1)
    expected = torch.einsum("hnk,hkd->nhd", weights, v)
    assert (got.dtype, got.shape) == (dtype, q.shape)
    rounding = max(2 * torch.finfo(dtype).eps, 1e-5)
    torch.testing.assert_close(got.double(), expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_heads_of_a_group_may_be_rows_of_one(groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(5, 8, 64, generator=generator)
    k, v = (torch.randn(groups, 23, 64, generator=generator) for _ in range(2))
    visible = torch.rand(5, 23, generator=generator) < 0.5
    visible[:, 0] = True
    torch.testing.assert_close(
        reference.grouped_attention(q, k, v, visible, 0.125), reference.tree_attention(q, k, v, visible, 0.125)
    )

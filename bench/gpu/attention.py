"""How long does attention of a tree take, against a dense mask, against no mask at all, and against FlexAttention?"""

from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu._shapes import random_tree
from bench.gpu._timing import CARD, in_turn
from offload_rt import ops

EXPECTED_S = 60
HEADS, KV_HEADS, HEAD_DIM, PREFIX = 64, 8, 128, 4096
N_NODES = (1, 64, 256, 768, 2048)


def measure() -> dict[str, object]:
    """Seconds of each, by tree size."""
    return {str(n): {name: asdict(spread) for name, spread in in_turn(_works(n)).items()} for n in N_NODES}


def _works(n: int) -> dict[str, object]:
    bits, depths = ops.tree_masks(torch.from_numpy(random_tree(n).parents).to(CARD))
    mask = ops.TreeMask(bits, depths, 0, PREFIX, None)
    q = torch.randn(n, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=CARD)
    k, v = (torch.randn(KV_HEADS, PREFIX + n, HEAD_DIM, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    dense, scale = mask.dense(), HEAD_DIM**-0.5
    queries = q.transpose(0, 1)[None]

    def sdpa(visible: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            queries, k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )

    def unmasked() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return sdpa(None)

    works = {
        "tree_attention": lambda: ops.tree_attention(q, k, v, mask, scale),
        "sdpa, dense mask": lambda: sdpa(dense),
        "flash, no mask": unmasked,
    }
    if n > 1:
        works["flex_attention"] = _flex(queries, k[None], v[None], dense, scale)
    return works


def _flex(q: Tensor, k: Tensor, v: Tensor, dense: Tensor, scale: float) -> object:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(
        lambda batch, head, row, key: dense[row, key], None, None, dense.shape[0], dense.shape[1], device=str(CARD)
    )
    return lambda: compiled(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)

"""How long does tree attention take, beside a dense mask, no mask, and FlexAttention?"""

from collections.abc import Callable, Iterator
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.shapes import random_tree
from bench.gpu.timing import CARD, in_turn
from offload_rt import ops
from offload_rt.ops import reference

EXPECTED_S = 90
HEADS, KV_HEADS, HEAD_DIM, PREFIX = 64, 8, 128, 4096
N_NODES = (768, 1, 64, 256, 2048)


def measure() -> Iterator[dict[str, object]]:
    """Seconds of each, by tree size; the sizes of the README come first."""
    found: dict[str, object] = {}
    for n in N_NODES:
        works, broken = _that_work(_works(n))
        found[str(n)] = {name: asdict(spread) for name, spread in in_turn(works).items()} | broken
        yield found


def _that_work(works: dict[str, Callable[[], object]]) -> tuple[dict[str, Callable[[], object]], dict[str, object]]:
    """Those that run, and why the others do not: a compiler may be missing, or a kernel for this mask."""
    broken: dict[str, object] = {}
    for name, work in works.items():
        try:
            work()
            torch.cuda.synchronize()
        except Exception as error:  # a compiler may raise anything
            broken[name] = {"failed": " ".join(str(error).split())[:300]}
    return {name: work for name, work in works.items() if name not in broken}, broken


def _works(n: int) -> dict[str, Callable[[], object]]:
    mask = ops.make_tree_mask(random_tree(n).parents, 0, PREFIX)
    mask = mask.of(ops.to_device(mask.tensors, CARD))
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
        # torch's fast kernels take a mask, or groups, not both.
        "sdpa, dense mask, groups as rows": lambda: reference.grouped_attention(q, k, v, dense, scale),
        "flash, no mask": unmasked,
    }
    if n > 1:
        works["flex_attention"] = _Flex(queries, k[None], v[None], dense, scale)
    return works


class _Flex:
    """torch's FlexAttention, compiled at its first call."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dense: Tensor, scale: float) -> None:
        self._tensors, self._dense, self._scale = (q, k, v), dense, scale
        self._compiled: Callable[[], object] | None = None

    def __call__(self) -> object:
        self._compiled = self._compiled or _flex(*self._tensors, self._dense, self._scale)
        return self._compiled()


def _flex(q: Tensor, k: Tensor, v: Tensor, dense: Tensor, scale: float) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(
        lambda batch, head, row, key: dense[row, key], None, None, dense.shape[0], dense.shape[1], device=str(CARD)
    )
    return lambda: compiled(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)

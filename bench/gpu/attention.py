"""How fast is tree attention compared with a dense mask, no mask, and the floor?

All are captured as CUDA graphs: the passes of the package replay them, and small trees would
measure launches otherwise.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.shapes import random_tree
from bench.gpu.timing import CARD, captured, in_turn
from offload_rt import ops
from offload_rt.ops import reference
from offload_rt.tree.topology import Topology

EXPECTED_S = 25
_PRODUCT = "matrix product"
_COPY = "copy on the card"


@dataclass(frozen=True)
class Shapes:
    """Sizes of trees, those of the README first, with heads and keys before them; a test makes them
    small.

    has_flex  whether to compile and measure FlexAttention, too
    """

    n_nodes: tuple[int, ...] = (768, 1, 256)
    heads: int = 64
    kv_heads: int = 8
    head_dim: int = 128
    prefix: int = 4096
    product_width: int = 8192
    nbytes_copied: int = 1 << 30
    has_flex: bool = False


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Seconds of each by tree size, the floor measured between them, and how often ours takes that
    of flash and the floor.
    """
    times_by_size: dict[str, object] = {}
    for n in shapes.n_nodes:
        tree = random_tree(n)
        replays, broken = _captured(_works(tree, shapes) | _ceilings(shapes))
        spreads = in_turn(replays)
        medians = {name: spread.median for name, spread in spreads.items()}
        floor = _floor(tree, shapes, medians)
        ours = medians.get("tree_attention", float("nan"))
        against = {
            "floor": ours / floor["seconds"],
            "flash, no mask": ours / medians.get("flash, no mask", float("nan")),
        }
        times = {name: asdict(spread) for name, spread in spreads.items()}
        times_by_size[str(n)] = times | broken | {"floor": floor, "tree_attention against": against}
        yield times_by_size


def _ceilings(shapes: Shapes) -> dict[str, Callable[[], object]]:
    width = shapes.product_width
    a, b = (torch.randn(width, width, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    source, target = (torch.randn(shapes.nbytes_copied // 4, device=CARD) for _ in range(2))
    return {_PRODUCT: lambda: torch.mm(a, b), _COPY: lambda: torch.neg(source, out=target)}


def _floor(tree: Topology, shapes: Shapes, medians: dict[str, float]) -> dict[str, float]:
    """Seconds of the products of rows with the keys they see, and of reading and writing everything
    once; the larger counts.
    """
    n_above = sum(len(tree.path_to(node)) + 1 for node in range(len(tree)))
    n_pairs = len(tree) * shapes.prefix + n_above
    flops = 4 * shapes.heads * shapes.head_dim * n_pairs
    n_keys = shapes.prefix + len(tree)
    nbytes = 2 * shapes.head_dim * 2 * (shapes.heads * len(tree) + shapes.kv_heads * n_keys)
    products = flops / (2 * shapes.product_width**3 / medians[_PRODUCT])
    memory = nbytes / (2 * shapes.nbytes_copied / medians[_COPY])
    return {"seconds": max(products, memory), "products": products, "memory": memory}


def _captured(
    works: dict[str, Callable[[], object]],
) -> tuple[dict[str, Callable[[], None]], dict[str, object]]:
    """Capture each work. Return the replays, and why others failed: a compiler may be missing, or a
    kernel for this mask.
    """
    replays: dict[str, Callable[[], None]] = {}
    broken: dict[str, object] = {}
    for name, work in works.items():
        try:
            replays[name] = captured(work)
            torch.cuda.synchronize()
        except Exception as error:  # a compiler may raise anything
            broken[name] = {"failed": " ".join(str(error).split())[:300]}
    return replays, broken


def _works(tree: Topology, shapes: Shapes) -> dict[str, Callable[[], object]]:
    n = len(tree)
    mask = ops.make_tree_mask(tree.parents, 0, shapes.prefix)
    mask = mask.with_tensors(ops.to_device(mask.tensors, CARD))
    q = torch.randn(n, shapes.heads, shapes.head_dim, dtype=torch.bfloat16, device=CARD)
    cache_shape = shapes.kv_heads, shapes.prefix + n, shapes.head_dim
    k, v = (torch.randn(cache_shape, dtype=torch.bfloat16, device=CARD) for _ in range(2))
    dense = mask.dense()
    scale = shapes.head_dim**-0.5
    queries = q.transpose(0, 1)[None]

    def sdpa(visible: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            queries, k[None], v[None], attn_mask=visible, scale=scale, enable_gqa=True
        )

    def unmasked() -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            return sdpa(None)

    works: dict[str, Callable[[], object]] = {
        "tree_attention": lambda: ops.tree_attention(q, k, v, mask, scale),
        "flash, no mask": unmasked,
    }
    if dense is not None:
        works["sdpa, dense mask"] = lambda: sdpa(dense)
        # torch's fast kernels take a mask, or groups, not both.
        grouped = partial(reference.tree_attention, q, k, v, dense, scale)
        works["sdpa, dense mask, groups as rows"] = grouped
        if shapes.has_flex:
            compiled = cache(partial(_flex, queries, k[None], v[None], dense, scale))

            def flex() -> object:
                return compiled()()

            works["flex_attention"] = flex
    return works


def _flex(q: Tensor, k: Tensor, v: Tensor, dense: Tensor, scale: float) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return dense[row, key]

    compiled = torch.compile(flex_attention)
    blocks = create_block_mask(sees, None, None, *dense.shape, device=str(CARD))
    return lambda: compiled(q, k, v, block_mask=blocks, scale=scale, enable_gqa=True)

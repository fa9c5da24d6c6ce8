"""Kernels against their torch references: emulated on the CPU, and on a device if available."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from ops.test_dequantize import arguments as dequantize_arguments
from support import languages
from support.coded_matrices import random_blocks
from support.tiny import random_tree
from torch.nn.functional import pad

from offload_rt.ops import make_tree_mask, reference
from offload_rt.ops.verification import arguments
from offload_rt.packing import KERNEL_BLOCKS
from offload_rt.speculate import residual
from offload_rt.tree.topology import DraftTree, SampledNodes, Topology


@dataclass(frozen=True)
class Case:
    n: int
    first: int
    n_before: int
    group: int
    kv_heads: int
    dim: int
    window: int
    dtype: torch.dtype
    seed: int
    n_chain: int = 0
    n_spare: int = 0


def inputs(case, device):
    """Return q, k, v as views into larger stores of NaN, and the mask of a tree on the host.

    k and v have `n_spare` extra columns of NaN.
    """
    generator = torch.Generator().manual_seed(case.seed)
    n_rows = case.first + case.n
    n_keys = case.n_before + n_rows

    def random_view(rows, columns, spare, n_spare=0):
        shape = rows + spare[0], columns + spare[1] + n_spare, case.dim
        store = torch.full(shape, torch.nan, dtype=case.dtype)
        store[:rows, :columns] = torch.randn(rows, columns, case.dim, generator=generator)
        return store.to(device)[:rows, : columns + n_spare]

    q = random_view(case.n, case.kv_heads * case.group, (1, 3))
    k, v = (random_view(case.kv_heads, n_keys, (0, 37), case.n_spare) for _ in range(2))
    n_chain = min(case.n_chain, n_rows - 1)
    parents = random_tree(n_rows - n_chain, case.seed).after_chain(n_chain).parents
    return q, k, v, make_tree_mask(parents, case.first, case.n_before).within(case.window or None)


def test_kernels_change_only_what_their_schema_names(kernels):
    for name, args in samples(kernels.device).items():
        # The checks clone pinned memory into unpinned memory, which a GPU cannot read.
        if name != "transfer" or kernels.device == "cpu":
            kernels.check_schema(name, args)


def random_case(seed):
    draw = random.Random(seed)
    group = draw.choice([1, 4, 8])
    n = draw.choice([1, 2, 3, 7, 16, 33, 70]) if group > 1 else draw.choice([1, 5, 63, 70, 130])
    return Case(
        n=n, first=draw.choice([0, 0, 1, 19, 40]),
        n_before=draw.choice([0, 0, 1, 31, 64, 65, 128, 199]), group=group,
        kv_heads=draw.choice([1, 2]), dim=draw.choice([64, 96, 128]),
        window=draw.choice([0, 0, 1, 3, 8, 50, 100]),
        dtype=draw.choice([torch.float16, torch.bfloat16]), seed=seed,
        n_chain=draw.choice([0, 0, 10, 60]),
    )  # fmt: skip


SPLIT = [
    Case(1, 0, 700, 8, 2, 128, 0, torch.float16, 0),
    Case(3, 2, 1030, 4, 1, 64, 0, torch.bfloat16, 1),
    Case(9, 0, 900, 8, 1, 96, 0, torch.float16, 2),
    Case(2, 0, 800, 1, 2, 64, 130, torch.float16, 3),
    # The window leaves some of the splits nothing to do.
    Case(4, 1, 1400, 4, 1, 64, 5, torch.float16, 4),
]
CASES = [random_case(seed) for seed in range(32)] + SPLIT
CASES += [
    replace(random_case(100 + seed), n_spare=(1, 40, 600, 1500)[seed % 4]) for seed in range(12)
]
# Multiprocessors with 228, 164 and 100 KB hold other tiles of many rows; see
# tests/support/cuda_on_cpu/cuda_runtime.h.
MANY_ROWS = [
    (Case(20, 19, 199, 8, 1, dim, window, torch.float16, 10 * dim + card, n_chain=30), card)
    for card in range(3) for dim in (64, 96, 128) for window in (0, 50)
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "card"),
    [*((case, 0) for case in CASES), *MANY_ROWS],
    ids=lambda case: case if isinstance(case, int) else f"{case.n}x{case.group}-{case.n_before}",
)
def test_tree_attention(kernels, monkeypatch, case, card):
    """With spare keys and rows as in a captured pass: the device holds the number of keys."""
    if kernels.device != "cpu" and card:
        pytest.skip("a card has the shared memory it has")
    monkeypatch.setenv("CUDA_ON_CPU_CARD", str(card))
    q, k, v, mask = inputs(case, kernels.device)
    bits, depths, key_depths, extent = mask.tensors
    dense = mask.dense()
    seen = torch.ones(case.n, mask.n_keys, dtype=torch.bool) if dense is None else dense
    if case.n_spare:
        n_most = case.first + case.n + case.n_spare
        bits = pad(bits, (0, -(-n_most // 32) - bits.shape[1]))
        key_depths = pad(key_depths, (0, n_most - len(key_depths)), value=1 << 20)
        spare = slice(random.Random(case.seed).randrange(case.n) + 1, None)
        bits[spare] = 0
        depths = depths.masked_fill(torch.arange(case.n) >= spare.start, 0)
        at = torch.arange(mask.n_keys) - case.n_before
        seen[spare] = (at < 0) & (at > -case.window) if case.window else at < 0
    given = [tensor.to(kernels.device) for tensor in (bits, depths, key_depths, extent)]
    result = kernels.tree_attention(q, k, v, *given, case.window, case.dim**-0.5)
    assert_attention(result, q, k, v, seen)


def assert_attention(result, q, k, v, mask):
    """Compare output and log-sum-exp with the reference; mask (n, n_keys) bool."""
    out, lse = result
    n_keys = mask.shape[1]
    mask = mask.to(q.device)
    k, v = (x[:, :n_keys].double() for x in (k, v))
    exact, exact_lse = reference.partial_attention(q.double(), k, v, mask, q.shape[2] ** -0.5)
    assert out.dtype == q.dtype and out.shape == q.shape and lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-5)
    # A weight is rounded to the dtype before the product, the result after it.
    error = 4 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(out.double(), exact, atol=error, rtol=error)


@pytest.mark.parametrize("seed", range(12))
def test_two_parts_of_the_keys_merge_to_the_whole(kernels, seed):
    """Cut anywhere before the tree; a row may see nothing of a part, or of both.

    Into float32, and in the dtype of both.
    """
    draw = random.Random(seed)
    case = replace(random_case(300 + seed), n_before=draw.choice([65, 128, 700]))
    q, k, v, mask = inputs(case, kernels.device)
    whole = mask.with_tensors(tensor.to(kernels.device) for tensor in mask.tensors)
    n = draw.choice([1, 33, case.n_before])
    before, behind = whole.split(n)
    first = kernels.tree_attention(q, k[:, :n], v[:, :n], *before.tensors, case.window, 0.1)
    second = kernels.tree_attention(q, k[:, n:], v[:, n:], *behind.tensors, case.window, 0.1)
    expected, expected_lse = kernels.tree_attention(q, k, v, *whole.tensors, case.window, 0.1)
    for part, lse in (first, second, (expected, expected_lse)):
        part[0] = 0
        lse[0] = -torch.inf
    if seed % 2:
        first = first[0].float(), first[1]
    out, lse = kernels.merge_attention(*first, *second)
    assert out.dtype == first[0].dtype
    error = 4 * torch.finfo(q.dtype).eps
    torch.testing.assert_close(out.to(q.dtype), expected, atol=error, rtol=error)
    torch.testing.assert_close(lse, expected_lse, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(4))
def test_commit_rows(kernels, dtype, seed):
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (draw.choice([1, 3]), draw.choice([1, 2, 5]), 50, draw.choice([8, 64, 96]))
    stores = [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]
    first = draw.choice([0, 3])
    n = draw.choice([1, 7, 8, 9, 30])
    rows = torch.randperm(40, generator=generator)[:n].sort().values
    mine = [store.clone().to(kernels.device) for store in stores]
    kernels.commit_rows(*mine, rows, first)
    reference.commit_rows(*stores, rows, first)
    assert all(torch.equal(own.cpu(), store) for own, store in zip(mine, stores, strict=True))


@pytest.mark.parametrize("seed", range(8))
def test_transfer(kernels, seed):
    """To the card and back, aligned to vectors and not; nothing around it is touched."""
    draw = random.Random(seed)
    n = draw.choice([1, 15, 16, 500, 70_000])
    starts = [draw.choice([0, 16, 3]) for _ in range(3)]
    source = torch.randint(1, 256, (n + 64,), dtype=torch.uint8)
    there = torch.zeros(n + 64, dtype=torch.uint8, device=kernels.device)
    back = torch.zeros(n + 64, dtype=torch.uint8)
    if kernels.device == "cuda":
        source = source.pin_memory()
        back = back.pin_memory()
    parts = [
        block[start : start + n] for block, start in zip((source, there, back), starts, strict=True)
    ]
    kernels.transfer(parts[1], parts[0])
    kernels.transfer(parts[2], parts[1])
    # a copy back waits for both
    assert torch.equal(there[starts[1] : starts[1] + n].cpu(), parts[0])
    assert torch.equal(parts[2], parts[0])
    assert back.count_nonzero() == there.count_nonzero() == n


def verified(kernels, leaf_to_root, tree, target, noise):
    """Compare end node and bonus with those of the rule on the host; return the end."""
    noise = torch.as_tensor(noise, dtype=torch.float64)
    decision = residual.ResidualRule(leaf_to_root, "").decide(tree, target, noise[:-1])
    cumulative = decision.probs.double().cumsum(0)
    bonus = int(torch.searchsorted(cumulative, noise[-1] * cumulative[-1], right=True))
    candidates = residual.candidates(tree)
    arrays, there = arguments(candidates, noise, torch.device(kernels.device))
    probs = tree.sampled.draft_probs.to(kernels.device), target.to(kernels.device)
    settings = candidates.n_levels, candidates.independent, leaf_to_root
    verdict = kernels.verify(*arrays, *probs, there, *settings)
    assert verdict.tolist() == [decision.end, min(bonus, int(decision.probs.nonzero()[-1]))]
    return decision.end


both_ways = pytest.mark.parametrize("leaf_to_root", [False, True])


@both_ways
def test_verify(kernels, leaf_to_root):
    kinds = set()
    for seed in range(60):
        vocabulary = (12, 37, 1000, 3001)[seed // 4 % 4]
        tree, target, _ = languages.random_case(seed, torch.float32, vocabulary)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(len(tree.topology) + 1, dtype=torch.float64, generator=generator)
        end = verified(kernels, leaf_to_root, tree, target, noise)
        kinds.add((end > 0, bool(tree.topology.children[end])))
    assert len(kinds) == 4, "accepted or not, at a leaf or not"


@pytest.mark.parametrize("is_sampled", [True, False])
@both_ways
def test_verify_with_almost_no_residual(kernels, leaf_to_root, is_sampled):
    """The residual of the draft or of the target is below float32 resolution."""
    probs, target = torch.zeros(2, 1, 3001)
    if is_sampled:
        # One thread adds these up, to 1.
        probs[0, [0, 512, 1024]] = torch.tensor([1.0, 3e-9, 1e-9])
        target[0, [1, 512]] = torch.tensor([0.625, 0.375])
    else:
        target[0, [0, 512]] = torch.tensor([1 - 2**-24, 3e-8])
    sampled = SampledNodes(np.array([False, is_sampled, is_sampled]), probs, np.array([0, -1, -1]))
    tree = DraftTree(Topology(np.array([-1, 0, 0])), torch.tensor([7, 0, 512]), sampled)
    target = target.repeat(3, 1)
    ends = {
        verified(kernels, leaf_to_root, tree, target, [0, 1 - 2**-53, second, 0.4])
        for second in (0.3, 0.45, 0.55, 0.9)
    }
    assert ends == ({0, 2} if is_sampled else {2})


def spread(likely, vocabulary=3001):
    """Return a distribution with given probabilities of some tokens and a uniform rest."""
    probs = torch.full((vocabulary,), (1 - sum(likely.values())) / (vocabulary - len(likely)))
    for token, prob in likely.items():
        probs[token] = prob
    return probs


# Direction, tree, tokens, deterministic nodes, the target's and the draft's likely tokens by node,
# noise, the last node accepted.
IN_PARTS = {
    # A node is left while its residual is still read, and the first pass of the next follows
    # without another before it.
    "top_down": (
        False, [-1, 0, 0, 2], [0, 10, 2000, 500], [0],
        {0: {2000: 0.9, 10: 1e-6}, 2: {2000: 1e-9, 500: 1e-3}},
        {0: {10: 0.9, 2000: 0.05}, 2: {500: 0.9}},
        [0, 0.5, 0.5, 0.5, 0.4], 2,
    ),
    "bottom_up": (
        True, [-1, 0, 0, 1, 1, 2], [0, 7, 8, 10, 2000, 500], [0, 1, 2],
        {0: {7: 0.3, 8: 0.6}, 1: {10: 1e-4, 2000: 0.68}, 2: {500: 1e-3, 2000: 0.9}},
        {1: {10: 0.5, 2000: 0.2}, 2: {500: 0.5}}, [0, 0.9, 0.1, 0.5, 0.5, 0.5, 0.4], 2,
    ),
    # Two sampled children are rejected, and the token of a deterministic one loses nothing.
    "hybrid": (
        False, [-1, 0, 0, 0], [0, 10, 2000, 500], [0, 3],
        {0: {10: 1e-6, 2000: 1e-6, 500: 0.5}}, {0: {10: 0.4, 2000: 0.3, 500: 0.2}},
        [0, 0.5, 0.5, 0.5, 0.4], 3,
    ),
    # The second of two equal siblings is rejected.
    **{
        f"equal {leaf_to_root} {end}": (
            leaf_to_root, [-1, 0, 0], [1, 7, 7], [0, 1, 2], {0: {7: 0.5}}, {}, [0, noise, 0.1, 0.3],
            end,
        ) for leaf_to_root in (False, True) for noise, end in ((0.6, 0), (0.4, 1))
    },
}  # fmt: skip


@pytest.mark.parametrize("case", IN_PARTS.values(), ids=IN_PARTS)
def test_verify_with_blocks_in_any_order(kernels, case):
    leaf_to_root, parents, tokens, deterministic, likely, drafted_likely, noise, end = case
    nodes = range(len(parents))
    target, draft = (
        torch.stack([spread(known.get(node, {})) for node in nodes])
        for known in (likely, drafted_likely)
    )
    sampled = SampledNodes(~np.isin(nodes, deterministic), draft, np.array(nodes))
    tree = DraftTree(Topology(np.array(parents)), torch.tensor(tokens), sampled)
    for _ in range(8):  # which block is ahead changes
        assert verified(kernels, leaf_to_root, tree, target, noise) == end


def test_bonus_at_the_ends_of_the_distribution(kernels):
    """Noise of 0 and almost 1, and distributions on the first or last token."""
    root = [torch.tensor(x, device=kernels.device) for x in ([0, 0], [], [7], [False], [-1])]
    root[1], root[3] = root[1].long(), root[3].bool()
    for vocabulary in (1, 33, 2500):
        for token in {0, vocabulary // 2, vocabulary - 1}:
            probs = torch.zeros(1, vocabulary, device=kernels.device)
            probs[0, token] = 1
            for noise in (0.0, 0.5, 1 - 2**-53):
                uniforms = torch.tensor([0.0, noise], dtype=torch.float64, device=kernels.device)
                verdict = kernels.verify(*root, probs[:0], probs, uniforms, 1, False, True)
                assert verdict.tolist() == [0, token]


def strided(generator, dtype, *shape, device="cpu"):
    """Random numbers as a view into a larger store of NaN."""
    store = torch.full((*shape[:-1], shape[-1] + 24), torch.nan, dtype=dtype)
    store[..., 8:-16] = torch.randn(shape, generator=generator).to(dtype)
    return store.to(device)[..., 8:-16]


def assert_rounds_alike(actual, expected):
    """Within one step of the dtype, and seldom that."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(
        actual, expected, atol=1e-6, rtol=1.01 * torch.finfo(actual.dtype).eps
    )
    assert (actual == expected).float().mean() > 0.9


@pytest.mark.parametrize("seed", range(16))
def test_rms_norm(kernels, seed):
    """Of rows and of heads, with a residual and without."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype = draw.choice([torch.float16, torch.bfloat16])
    width = draw.choice([8, 64, 128, 520, 1032, 4096, 16384])
    n = draw.choice([1, 3, 9, 17]) if width < 4096 else 2
    weight = strided(generator, dtype, width, device=kernels.device)
    if seed % 2:
        x = strided(generator, dtype, n, draw.choice([1, 5]), width, device=kernels.device)
        assert_rounds_alike(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
        return
    x, delta = (strided(generator, dtype, n, width, device=kernels.device) for _ in range(2))
    plain = x.clone()
    expected = reference.add_rms_norm(plain, delta, weight, 1e-5)
    assert_rounds_alike(kernels.add_rms_norm(x, delta, weight, 1e-5), expected)
    assert torch.equal(x, plain)


@pytest.mark.parametrize("seed", range(16))
def test_rotate_and_store(kernels, seed):
    """q, k and v as parts of one product; rows in any order. Bit for bit."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    device = kernels.device
    dtype = draw.choice([torch.float16, torch.bfloat16])
    dim = draw.choice([16, 64, 80, 96, 128])
    n = draw.choice([1, 2, 7, 33])
    kv_heads = draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 4])
    product = strided(generator, dtype, n, (heads + 2 * kv_heads) * dim, device=device)
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    qkv = [part.view(n, -1, dim) for part in product.split(widths, dim=1)]
    rotary = [strided(generator, dtype, n, dim, device=device) for _ in range(2)]
    stores = torch.randn(2, kv_heads, 40, dim, generator=generator).to(device, dtype)
    plain = stores.clone()
    first = draw.randrange(40 - n)
    rows = torch.randperm(40, generator=generator)[:n].to(device) if seed % 2 else None
    at = slice(first, first + n) if rows is None else rows
    expected = reference.rotate_and_store(*qkv, rotary, *plain, at)
    assert torch.equal(kernels.rotate_and_store(*qkv, *rotary, *stores, rows, first), expected)
    assert torch.equal(stores, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 8), (3, 2056), (9, 96)])
def test_silu_mul(kernels, shape, dtype):
    """Of two parts of one product; far from zero as well."""
    product = 4 * strided(
        torch.Generator().manual_seed(0), dtype, shape[0], 2 * shape[1], device=kernels.device
    )
    product[0, :8] = torch.tensor([-200, -90, -20, -0.0, 0.0, 20, 90, 200])
    gate, up = product.split(shape[1], dim=1)
    assert_rounds_alike(kernels.silu_mul(gate, up), reference.silu_mul(gate, up))


def samples(device):
    case = random_case(3)
    *qkv, mask = inputs(case, device)
    matrix = random_blocks("Q4_K", 1)
    stack = torch.randn(3, 24, 96, device=device).bfloat16()[:2]
    store = torch.randn(2, 2, 20, 64, device=device)
    tree, target, _ = languages.random_case(3, torch.float32)
    candidates = residual.candidates(tree)
    noise = torch.rand(len(tree.topology) + 1, dtype=torch.float64)
    arrays, noise = arguments(candidates, noise, torch.device(device))
    verification = (
        *arrays, tree.sampled.draft_probs.to(device), target.to(device), noise, candidates.n_levels,
    )  # fmt: skip
    x, delta, weight, rotary = (torch.randn(n, 64, device=device).half() for n in (3, 3, 1, 3))
    heads = torch.randn(3, 2, 64, device=device).half()
    stores = torch.randn(2, 2, 9, 64, device=device).half()
    return {
        "rms_norm": (x, weight[0], 1e-5),
        "add_rms_norm": (x, delta, weight[0], 1e-5),
        "rotate_and_store": (
            heads, heads, heads, rotary, rotary, *stores, torch.tensor([1, 8, 4], device=device), 7,
        ),
        "silu_mul": (x, delta),
        "tree_attention": (*qkv, *(part.to(device) for part in mask.tensors), case.window, 0.1),
        "dequantize": dequantize_arguments("columns", 3, torch.bfloat16, device),
        "dequantize_blocks": (
            matrix.blocks.to(device), [*KERNEL_BLOCKS].index("Q4_K"),
            torch.empty(matrix.shape, device=device),
        ),
        "few_rows": (
            torch.randn(3, 96, device=device).bfloat16(), torch.tensor([2, 0, 1, 1], device=device),
            torch.tensor([1, 3], dtype=torch.int32, device=device), stack, None, None,
            torch.zeros(2, 24, device=device).bfloat16(), 7, 1, 8, 0,
        ),
        "merge_attention": (
            heads, heads[..., 0].float().contiguous(), heads, heads[..., 1].float().contiguous(),
        ),
        "transfer": (store, store.cpu().pin_memory() if device == "cuda" else store.clone()),
        "commit_rows": (store, store.clone(), torch.tensor([1, 4]), 2),
        "verify": (*verification, candidates.independent, True),
    }  # fmt: skip


@pytest.mark.parametrize(("name", "place", "change", "message"), [
    ("tree_attention", 0, lambda x: x.float(), "float16 or bfloat16"),
    ("tree_attention", 1, lambda x: x[:, 1:], "entries in dimension 1"),
    ("tree_attention", 2, lambda x: x.float(), "dtype of the first"),
    ("tree_attention", 0, lambda x: x[..., :40], "head dimension"),
    ("tree_attention", 3, lambda x: x.long(), "wrong dtype"),
    ("tree_attention", 3, lambda x: x[:1], "masks must have"),
    ("tree_attention", 4, lambda x: x[:1], "depths must have"),
    ("tree_attention", 5, lambda x: x.repeat(50), "a bit for each"),
    ("tree_attention", 6, lambda x: x[:1], "extent must have 2"),
    ("commit_rows", 0, lambda x: x[..., :62].contiguous(), "entries in dimension 3|16 bytes"),
    ("transfer", 1, lambda x: x[1:], "as many bytes"),
    ("transfer", 0, lambda x: x.transpose(0, 1), "contiguous"),
    ("merge_attention", 1, lambda x: x[:2], "lse_a must have 3"),
    ("merge_attention", 2, lambda x: x[..., :32].contiguous(), "out_b must have 64"),
    ("merge_attention", 2, lambda x: x.double(), "must be float32"),
    ("commit_rows", 2, lambda x: x.int(), "int64 on the host"),
    ("commit_rows", 3, lambda _: 19, "past the end"),
    ("rms_norm", 0, lambda x: x.float(), "float16 or bfloat16"),
    ("rms_norm", 0, lambda x: x[:, :63], "multiple of 8"),
    ("rms_norm", 0, lambda x: x.flatten()[4:-60].view(2, 64), "multiples of 16 bytes"),
    ("rms_norm", 1, lambda x: x[:56], "weight must have 64"),
    ("add_rms_norm", 1, lambda x: x[:1], "delta must have 3"),
    ("add_rms_norm", 1, lambda x: x.float(), "dtype of the first"),
    ("rotate_and_store", 0, lambda x: x[..., :56], "multiple of 16"),
    ("rotate_and_store", 2, lambda x: x[:, :1], "v must have 2"),
    ("rotate_and_store", 3, lambda x: x[:, :32], "cos must have 64"),
    ("rotate_and_store", 6, lambda x: x[:, 1:], "values must be contiguous"),
    ("rotate_and_store", 7, lambda x: x.int(), "wrong dtype"),
    ("rotate_and_store", 7, lambda _: None, "past the end"),
    ("silu_mul", 1, lambda x: x[:2], "up must have 3"),
    ("verify", 1, lambda x: x[1:], "children must have"),
    ("verify", 6, lambda x: x.double(), "target has the wrong dtype"),
    ("dequantize", 0, lambda x: x[1:], "codes must have"),
    ("dequantize", 0, lambda x: x.short(), "codes has the wrong dtype"),
    ("dequantize", 1, lambda x: x[:, 1:].contiguous(), "scales must have"),
    ("dequantize", 1, lambda x: x.double(), "scales must be float32"),
    ("dequantize", 2, lambda x: x[:, 1:].contiguous(), "zeros must have"),
    ("dequantize", 3, lambda x: x[1:], "groups must have"),
    ("dequantize", 4, lambda _: 7, "unknown kind"),
    ("dequantize", 5, lambda _: 9, "1 to 8 bits"),
    ("dequantize", 6, lambda _: 0, "blocks must not be empty"),
    ("dequantize", 9, lambda x: x.int(), "out must be float32"),
    ("dequantize", 9, lambda x: x.T, "out must be contiguous"),
    ("dequantize_blocks", 0, lambda x: x[1:], "blocks must have"),
    ("dequantize_blocks", 0, lambda x: x[:, 1:].contiguous(), "blocks must have"),
    ("dequantize_blocks", 0, lambda x: x.int(), "blocks has the wrong dtype"),
    ("dequantize_blocks", 1, lambda _: 12, "unknown kind"),
    ("dequantize_blocks", 2, lambda x: x[:, 1:].contiguous(), "a multiple of 256"),
    ("dequantize_blocks", 2, lambda x: x.double(), "out must be float32"),
    ("few_rows", 0, lambda x: x[:, :64].contiguous(), "codes must have 64"),
    ("few_rows", 2, lambda x: x[:1], "ends must have 2"),
    ("few_rows", 2, lambda _: None, "codes must have 1"),
    ("few_rows", 3, lambda x: x[0], "3 dimensions"),
    ("few_rows", 3, lambda x: x.flatten()[4:].as_strided((2, 24, 96), (2304, 96, 1)),
        "multiple of 16"),
    ("few_rows", 6, lambda x: x[:, :8].contiguous(), "bias must have 24"),
])  # fmt: skip
def test_invalid_arguments_are_refused_with_a_reason(kernels, name, place, change, message):
    args = list(samples(kernels.device)[name])
    args[place] = change(args[place])
    with pytest.raises(RuntimeError, match=message):
        getattr(kernels, name)(*args)

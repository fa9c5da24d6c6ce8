"""Kernels of residual verification: top-down from the root, and bottom-up from the leaves.

A node's residual is stored as `scale * rest`. Rejecting a deterministic child then changes a single
entry and the scale. Only a rejected sampled child costs a pass over the vocabulary. See
docs/exactness.md for the method. The kernels carry no type hints: numba infers their types.
"""

import numpy as np

from offload_rt.system.numba_cache import compiled

# Entries per float32 partial sum; partial sums are added in float64.
_BLOCK = 1024
# Remainders below this are summed again, because subtraction would leave mostly rounding errors.
_CANCELLED = 1e-4
# Smallest normal float32. Draft distributions contain no denormals, so a smaller remainder is 0.
_TINY = 1.1754943508222875e-38


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _block_sums(values):  # type: ignore[no-untyped-def]
    total = 0.0
    for first in range(0, len(values), _BLOCK):
        part = values.dtype.type(0)
        for x in values[first : first + _BLOCK]:
            part += x
        total += part
    return total


@compiled(fastmath={"reassoc", "contract", "nsz"})
def _subtract(rest, factor, probs, share, floor):  # type: ignore[no-untyped-def]
    """Set rest to max(factor * rest - share * probs - floor, 0) in place; return its sum."""
    factor = rest.dtype.type(factor)
    share = rest.dtype.type(share)
    floor = rest.dtype.type(floor)
    zero = rest.dtype.type(0)
    total = 0.0
    for first in range(0, len(rest), _BLOCK):
        part = rest.dtype.type(0)
        for i in range(first, min(first + _BLOCK, len(rest))):
            left = max(factor * rest[i] - share * probs[i] - floor, zero)
            rest[i] = left
            part += left
        total += part
    return total


@compiled()
def _remainder(tree, node, i):  # type: ignore[no-untyped-def]
    """Return draft probability and number of the tokens available to the sampled i-th child."""
    first = tree.starts[node]
    last = tree.starts[node + 1]
    row = tree.row_of[node]
    probs = tree.draft_probs[row]
    if tree.sums[row] < 0:
        tree.sums[row] = _block_sums(probs)
    whole = tree.sums[row]
    if tree.independent:
        return whole, len(probs)
    excluded = 0.0
    n_excluded = 0
    for j in range(first, last):
        sibling = tree.children[j]
        if j < first + i or not tree.is_sampled[sibling]:
            excluded += probs[tree.tokens[sibling]]
            n_excluded += 1
    left = whole - excluded
    if left < _CANCELLED:
        left = 0.0
        for token in range(len(probs)):
            is_excluded = False
            for j in range(first, last):
                sibling = tree.children[j]
                is_gone = j < first + i or not tree.is_sampled[sibling]
                if is_gone and tree.tokens[sibling] == token:
                    is_excluded = True
            if not is_excluded:
                left += probs[token]
    return left, len(probs) - n_excluded


@compiled()
def _child_probs(tree, node, i):  # type: ignore[no-untyped-def]
    """Return a sampled child's distribution as (share, floor): share * q + floor."""
    left, n_left = _remainder(tree, node, i)
    return (1.0 / left, 0.0) if left >= _TINY else (0.0, 1.0 / max(n_left, 1))


@compiled()
def _acceptance(tree, node, i, weight, rest):  # type: ignore[no-untyped-def]
    """Return min(1, weight * rest / q) at the token of the i-th child with distribution q.

    `weight` includes the scale of `rest`.
    """
    child = tree.children[tree.starts[node] + i]
    token = tree.tokens[child]
    wanted = weight * rest[token]
    if wanted <= 0.0:
        return 0.0
    probs = 1.0
    if tree.is_sampled[child]:
        share, floor = _child_probs(tree, node, i)
        probs = share * tree.draft_probs[tree.row_of[node], token] + floor
    return min(1.0, wanted / probs)


@compiled()
def _subtract_sampled(tree, node, i, weight, rest, share, floor):  # type: ignore[no-untyped-def]
    """Set rest to max(weight * rest - distribution of the i-th child, 0); return its sum."""
    first = tree.starts[node]
    last = first if tree.independent else tree.starts[node + 1]
    kept = np.empty(last - first)
    for j in range(first, last):
        kept[j - first] = rest[tree.tokens[tree.children[j]]]
    total = _subtract(rest, weight, tree.draft_probs[tree.row_of[node]], share, floor)
    for j in range(first, last):
        sibling = tree.children[j]
        token = tree.tokens[sibling]
        if j < first + i or not tree.is_sampled[sibling]:  # unavailable to the child: undo
            total += weight * kept[j - first] - rest[token]
            rest[token] = weight * kept[j - first]
    return total


@compiled()
def _reject(tree, node, i, accept, scale, rest):  # type: ignore[no-untyped-def]
    """Subtract the distribution of the rejected i-th child from a node's residual.

    accept  acceptance probability of the node so far, which weighs its residual
    Returns the sum of the new residual and its scale, or (0, 0) for an empty residual.
    """
    child = tree.children[tree.starts[node] + i]
    if tree.is_sampled[child]:
        share, floor = _child_probs(tree, node, i)
        left = _subtract_sampled(tree, node, i, accept * scale, rest, share, floor)
        return (left, 1.0 / left) if left > 0.0 else (0.0, 0.0)
    kept = 1.0 - min(scale * rest[tree.tokens[child]], 1.0)
    rest[tree.tokens[child]] = 0
    if kept < _CANCELLED:
        kept = scale * _block_sums(rest)
    return (accept * kept, scale / kept) if kept > 0.0 else (0.0, 0.0)


@compiled()
def verify_top_down(tree, target, uniforms, acceptance):  # type: ignore[no-untyped-def]
    """Accept a child, or subtract its distribution and try the next (Miao et al. 2024).

    target      (n, vocabulary)
    uniforms    (n,) see `ResidualRule.decide`
    acceptance  (n,) output: acceptance probability of each tried node
    Returns the last accepted node and the distribution of the bonus token.
    """
    node = 0
    i = 0
    scale = 1.0
    rest = target[0].copy()
    while tree.starts[node] + i < tree.starts[node + 1]:
        child = tree.children[tree.starts[node] + i]
        acceptance[child] = _acceptance(tree, node, i, scale, rest)
        if uniforms[child] < acceptance[child]:
            node = child
            i = 0
            scale = 1.0
            rest[:] = target[child]
            continue
        left, scale = _reject(tree, node, i, 1.0, scale, rest)
        if left <= 0.0:  # draft and target agree: only rounding rejected the child
            rest[:] = target[node]
            scale = 1.0
        i += 1
    return node, (rest * scale).astype(target.dtype)


@compiled()
def verify_bottom_up(tree, target, uniforms, acceptance):  # type: ignore[no-untyped-def]
    """Verify from the leaves to the root (Weng et al. 2025).

    A node is tried after its subtree, with the acceptance probability left over by the subtree.
    Arguments and result equal those of `verify_top_down`. With larger subtrees first, the expected
    acceptance was never below `verify_top_down` in tests. On a chain it is block verification.
    """
    nodes = np.zeros(tree.n_levels, np.int64)
    at = np.zeros(tree.n_levels, np.int64)
    accepts = np.ones(tree.n_levels)
    scales = np.ones(tree.n_levels)
    rests = np.empty((tree.n_levels, target.shape[1]), target.dtype)
    rests[0] = target[0]
    level = 0
    while True:
        node = nodes[level]
        i = at[level]
        accept = accepts[level]
        n_children = tree.starts[node + 1] - tree.starts[node]
        if i < n_children:
            below = _acceptance(tree, node, i, accept * scales[level], rests[level])
            at[level] += 1
            if below > 0.0:
                level += 1
                nodes[level] = tree.children[tree.starts[node] + i]
                at[level] = 0
                accepts[level] = below
                scales[level] = 1.0
                # a leaf needs no residual
                if tree.starts[nodes[level]] < tree.starts[nodes[level] + 1]:
                    rests[level] = target[nodes[level]]
                continue
        else:
            acceptance[node] = accept
            if level == 0 or uniforms[node] < accept:
                break
            level -= 1
            node = nodes[level]
            i = at[level] - 1
            accept = accepts[level]
            n_children = tree.starts[node + 1] - tree.starts[node]
        # The child and its subtree are rejected. Acceptance only falls, so after the last child a
        # lost node stays lost.
        if level > 0 and i == n_children - 1 and uniforms[node] >= accept:
            continue
        left, scales[level] = _reject(tree, node, i, accept, scales[level], rests[level])
        if left > 0.0:
            accepts[level] = left / (left + (1.0 - accept))  # this order yields exactly 1 - 1 = 0
        elif level > 0:
            accepts[level] = 0.0
            at[level] = n_children
        else:
            rests[0] = target[0]
            scales[0] = 1.0
    if tree.starts[nodes[level]] == tree.starts[nodes[level] + 1]:
        return nodes[level], target[nodes[level]].copy()
    return nodes[level], (rests[level] * scales[level]).astype(target.dtype)

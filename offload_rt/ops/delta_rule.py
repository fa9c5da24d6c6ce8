"""The gated delta rule of linear attention (Yang et al. 2024) for the rows of a tree, in plain
torch.

A row decays the state of its parent, S = exp(g) S, and corrects what it holds for the row's key: S
+= k u^T with u = beta (v - S^T k). A tree needs no state for each node: with the ancestor mask in
place of the causal one, the corrections u of all rows are one triangular solve (the chunk form; for
trees: TreeWY, arXiv 2608.20961).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows of a chain that are solved for together: sums of decays stay small, so that their differences
# are exact.
BLOCK_ROWS = 64


class DeltaRows(NamedTuple):
    """What layers give for n rows; keys and queries are normed, queries scaled.

    q, k              (n, n_k_heads, k_dim); each head serves as many heads of v, one behind the
                      other
    v                 (n, n_v_heads, v_dim)
    log_decays, beta  (n, n_v_heads); log-decays are at most 0
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decays: Tensor
    beta: Tensor

    def part(self, first: int, stop: int | None = None) -> "DeltaRows":
        """Some of the rows."""
        return DeltaRows(*(one[first:stop] for one in self))


class DeltaTerms(NamedTuple):
    """What rows add to a state, (..., n, heads, dim) each; those of decays without the last
    dimension.

    k           keys
    u           corrections of the values
    log_decays  of each row
    totals      their sums from the first row below the state down to each row
    """

    k: Tensor
    u: Tensor
    log_decays: Tensor
    totals: Tensor


def convolve(taps: list[Tensor], weight: Tensor) -> Tensor:
    """Convolution of each channel over the row and those above it, then SiLU: (n, channels).

    taps    the inputs (n, channels) that rows take, their own first
    weight  (channels, kernel), in the order of a text
    """
    wide = torch.promote_types(taps[0].dtype, torch.float32)
    out = torch.zeros_like(taps[0], dtype=wide)
    for tap, one in zip(taps, weight.flip(1).unbind(1), strict=True):
        out.addcmul_(tap.to(wide), one.to(wide))
    return F.silu(out.to(taps[0].dtype))


def normed(x: Tensor) -> Tensor:
    """Heads (..., dim) of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    rows: DeltaRows, state: Tensor, sees: Tensor, above: DeltaTerms
) -> tuple[Tensor, DeltaTerms]:
    """Outputs (n, n_v_heads, v_dim) of n rows, and their terms.

    state  (n_v_heads, k_dim, v_dim) above all rows
    sees   (n, m) bool: itself and which of its ancestors a row has among the m rows, the last n of
           which are these
    above  of the first m - n rows
    """
    q, k, v, log_decays, beta = rows
    n = len(q)
    heads = (q.shape[1], v.shape[1] // q.shape[1])
    decays = torch.cat((above.log_decays, log_decays))
    own = sees.to(decays.dtype) @ decays
    keys = torch.cat((above.k, k))
    totals = torch.cat((above.totals, own))
    # Heads first from here on: (n_k_heads, heads of v for each, rows, ...).
    q, k, keys = (one.transpose(0, 1)[:, None] for one in (q, k, keys))
    v, u_above = (one.transpose(0, 1).reshape(*heads, *one.shape[::2]) for one in (v, above.u))
    total, all_totals, rate = (one.T.contiguous().view(*heads, -1) for one in (own, totals, beta))
    state = state.view(*heads, *state.shape[1:])
    decay = (total[..., None] - all_totals[..., None, :]).masked_fill_(~sees, -torch.inf).exp_()
    from_state = total.exp()[..., None]
    # In place where there are pairs of rows, and solved from the right: no copies of them.
    weights = (decay * (k @ keys.mT)).mul_(rate[..., None])
    wanted = rate[..., None] * (v - from_state * (k @ state)) - weights[..., :-n] @ u_above
    u = torch.linalg.solve_triangular(
        weights[..., -n:].mT, wanted.mT, upper=True, left=False, unitriangular=True
    ).mT
    out = from_state * (q @ state) + decay.mul_(q @ keys.mT) @ torch.cat((u_above, u), 2)
    rows_first = (one.flatten(0, 1).transpose(0, 1) for one in (out, u))
    return next(rows_first), DeltaTerms(
        keys[:, 0].transpose(0, 1)[-n:], next(rows_first), log_decays, own
    )


def fold(state: Tensor, terms: DeltaTerms) -> None:
    """Bring states (..., n_v_heads, k_dim, v_dim) behind the last of the rows of a path, in
    place.
    """
    group = state.shape[-3] // terms.k.shape[-2]
    last = terms.totals[..., -1:, :]
    k = terms.k.repeat_interleave(group, -2) * (last - terms.totals).exp()[..., None]
    flat = state.view(-1, *state.shape[-2:])
    flat *= last.exp().reshape(-1, 1, 1)
    flat.baddbmm_(k.movedim(-3, -1).flatten(0, -3), terms.u.movedim(-3, -2).flatten(0, -3))

"""Gated delta rule of linear attention (Yang et al. 2024) for tree rows, in plain torch.

A row decays its parent's state, S = exp(g) S, and corrects the value at its key: S += k u^T with
u = beta (v - S^T k). Trees need no state per node. With the ancestor mask instead of the causal
mask, a triangular solve yields the corrections u of all rows (TreeWY, arXiv 2608.20961).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Rows per triangular solve of a chain. Small sums of decays keep their differences exact.
BLOCK_ROWS = 64


class DeltaRows(NamedTuple):
    """Inputs of n rows; keys and queries normalized, queries scaled.

    q, k              (n, n_k_heads, k_dim); each head belongs to consecutive heads of v
    v                 (n, n_v_heads, v_dim)
    log_decays, beta  (n, n_v_heads); log-decays are at most 0
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decays: Tensor
    beta: Tensor

    def part(self, first: int, stop: int | None = None) -> "DeltaRows":
        """Return a slice of the rows."""
        return DeltaRows(*(tensor[first:stop] for tensor in self))


class DeltaTerms(NamedTuple):
    """State updates of rows.

    k           (..., n, heads, dim) keys
    u           (..., n, heads, dim) corrections of the values
    log_decays  (..., n, heads)
    totals      (..., n, heads) sums of log-decays from the state to each row
    """

    k: Tensor
    u: Tensor
    log_decays: Tensor
    totals: Tensor


def convolve(taps: list[Tensor], weight: Tensor) -> Tensor:
    """Convolve each channel over a row and its ancestors, then apply SiLU: (n, channels).

    taps    inputs (n, channels) per distance, a row's own input first
    weight  (channels, kernel), in text order
    """
    wide = torch.promote_types(taps[0].dtype, torch.float32)
    out = torch.zeros_like(taps[0], dtype=wide)
    for tap, column in zip(taps, weight.flip(1).unbind(1), strict=True):
        out.addcmul_(tap.to(wide), column.to(wide))
    return F.silu(out.to(taps[0].dtype))


def normed(x: Tensor) -> Tensor:
    """Normalize heads (..., dim) to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def delta_rule(
    rows: DeltaRows, state: Tensor, sees: Tensor, above: DeltaTerms
) -> tuple[Tensor, DeltaTerms]:
    """Compute the outputs (n, n_v_heads, v_dim) and the terms of n rows.

    state  (n_v_heads, k_dim, v_dim) before all rows
    sees   (n, m) bool: a row and its ancestors among m rows; the last n columns are the rows
    above  terms of the first m - n rows
    """
    q, k, v, log_decays, beta = rows
    n = len(q)
    heads = (q.shape[1], v.shape[1] // q.shape[1])
    decays = torch.cat((above.log_decays, log_decays))
    row_totals = sees.to(decays.dtype) @ decays
    keys = torch.cat((above.k, k))
    totals = torch.cat((above.totals, row_totals))
    # Heads first from here on: (n_k_heads, heads of v for each, rows, ...).
    q, k, keys = (x.transpose(0, 1)[:, None] for x in (q, k, keys))
    v, u_above = (x.transpose(0, 1).reshape(*heads, *x.shape[::2]) for x in (v, above.u))
    total, all_totals, rate = (
        x.T.contiguous().view(*heads, -1) for x in (row_totals, totals, beta)
    )
    state = state.view(*heads, *state.shape[1:])
    decay = (total[..., None] - all_totals[..., None, :]).masked_fill_(~sees, -torch.inf).exp_()
    from_state = total.exp()[..., None]
    # In place and solved from the right, to avoid copies of row pairs.
    weights = (decay * (k @ keys.mT)).mul_(rate[..., None])
    wanted = rate[..., None] * (v - from_state * (k @ state)) - weights[..., :-n] @ u_above
    u = torch.linalg.solve_triangular(
        weights[..., -n:].mT, wanted.mT, upper=True, left=False, unitriangular=True
    ).mT
    out = from_state * (q @ state) + decay.mul_(q @ keys.mT) @ torch.cat((u_above, u), 2)
    out, u = (x.flatten(0, 1).transpose(0, 1) for x in (out, u))
    return out, DeltaTerms(keys[:, 0].transpose(0, 1)[-n:], u, log_decays, row_totals)


def fold(state: Tensor, terms: DeltaTerms) -> None:
    """Advance states (..., n_v_heads, k_dim, v_dim) to the last row of a path, in place."""
    group = state.shape[-3] // terms.k.shape[-2]
    last = terms.totals[..., -1:, :]
    k = terms.k.repeat_interleave(group, -2) * (last - terms.totals).exp()[..., None]
    flat = state.view(-1, *state.shape[-2:])
    flat *= last.exp().reshape(-1, 1, 1)
    flat.baddbmm_(k.movedim(-3, -1).flatten(0, -3), terms.u.movedim(-3, -2).flatten(0, -3))

"""Mixtures on a CPU: the chosen experts of a layer in one product per projection."""

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from offload_rt.models.layers import LayerWeights

# Expert modules of each projection, by expert.
Modules = Sequence[Sequence[str]]


def mix(
    weights: LayerWeights,
    modules: tuple[Modules, Modules],
    module: Any,
    hidden: Tensor,
    chosen: Tensor,
    scores: Tensor,
) -> Tensor:
    """Compute a mixture, see transformers' ExpertsInterface.

    modules         matrices of the first projection, and of the second
    chosen, scores  (n_rows, n_used)
    Outputs are added in expert order, as in `Touched.mix`.
    """
    n_rows, n_used = chosen.shape
    numbers, order = chosen.flatten().sort(stable=True)
    n_chosen = Counter(numbers.tolist())
    experts = list(n_chosen)
    ends = list(accumulate(n_chosen.values()))
    up, down = modules
    x = hidden if n_rows == 1 else hidden[order // n_used]
    inner = weights.linear_experts(x, ends, up, experts)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = weights.linear_experts(inner, ends, down, experts)
    out = module.post_expert_norm(out) if module.has_post_expert_norm else out
    weighted = (out * scores.flatten()[order, None]).to(hidden.dtype)
    if n_rows > 1:
        weighted = weighted[(order // n_used).argsort(stable=True)]
    mixed = torch.zeros_like(hidden)
    for part in weighted.view(n_rows, n_used, -1).unbind(1):
        mixed += part
    return mixed

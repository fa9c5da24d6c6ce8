"""The noise that decides a sequence's next tokens, added to a draft's logits."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from offload_rt.executor.sequence import Sequence
from offload_rt.ops import to_device

# What a softmax of perturbed logits is divided by: the size of a draft's errors, at any temperature of the sequence.
_ERROR = 0.75


@dataclass(frozen=True)
class Perturbation:
    """Of a tree below the last token of a sequence.

    noise  (levels, vocabulary) float32: of the tokens after the nodes of each level, times the sequence's temperature
    """

    noise: Tensor

    @classmethod
    def of(cls, sequence: Sequence, n_levels: int, n_tokens: int, device: torch.device, n_ahead: int = 0) -> Self:
        """Of a tree with so many levels of nodes that have children, over a vocabulary of so many tokens.

        n_ahead  levels that the tree's root is below the last token
        """
        noise = sequence.noise.at(len(sequence.tokens), n_ahead + n_levels, n_tokens, device)[n_ahead:]
        return cls(noise.log().mul_(-sequence.temperature))

    def __call__(self, logits: Tensor, depths: np.ndarray) -> Tensor:
        """Perturbed logits (rows, vocabulary) of nodes of depths (rows,); the largest is the draft's guess of the token."""
        (levels,) = to_device([torch.tensor(depths)], self.noise.device)
        return self.noise.index_select(0, levels).add_(logits).div_(_ERROR)

"""The distribution of sampled texts: enumerated with transformers' logits and warpers, and a test of counts against it."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from tiny import CASES, chi_square_p, logits_of
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload_rt import SamplingParams

N_NEW = 3
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}


def small_model(vocab_size: int, n_layers: int, sureness: float = 2.0) -> PreTrainedModel:
    """A model of a few tokens."""
    model = CASES["llama"].build(1, **SMALL, vocab_size=vocab_size, num_hidden_layers=n_layers)
    model.lm_head.weight.data *= sureness
    return model


def exact_distribution(model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams) -> np.ndarray:
    """The probability of each text of N_NEW tokens, (vocabulary,) * N_NEW."""
    vocab_size = model.config.vocab_size
    warpers = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(params.repetition_penalty)])
    warpers.append(TemperatureLogitsWarper(params.temperature))
    warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
    warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
    warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    probs = np.ones((vocab_size,) * N_NEW)
    for text in itertools.product(range(vocab_size), repeat=N_NEW - 1):
        logits = logits_of(model, [*prompt, *text])
        for n in range(N_NEW):
            before = torch.tensor([[*prompt, *text[:n]]])
            next_probs = torch.softmax(warpers(before, logits[None, before.shape[1] - 1]).double(), -1)[0].numpy()
            probs[text] *= next_probs[text[n]] if n < N_NEW - 1 else next_probs
    assert abs(probs.sum() - 1) < 1e-6
    return probs


def assert_distribution(texts: Iterable[Sequence[int]], probs: np.ndarray) -> None:
    """Chi-square, texts that are too rare taken together; a text of probability zero never occurs."""
    counts = Counter(map(tuple, texts))
    observed = np.array([counts[text] for text in np.ndindex(probs.shape)], dtype=float)
    expected = probs.ravel() * counts.total()
    assert observed[expected == 0].sum() == 0
    rare = expected < 8
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    assert keep.sum() > 10, "too few texts to tell distributions apart"
    assert chi_square_p(observed[keep], expected[keep]) > 1e-3

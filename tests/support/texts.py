"""Texts of a drafter and rule, and their distribution enumerated with transformers' logits."""

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.generation import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from offload_rt import LLM, SamplingParams
from offload_rt.executor.sequence import Sequence as TokenSequence
from offload_rt.speculate.protocols import Drafter
from offload_rt.speculate.select import load_rule
from support.tiny import CASES, assert_drawn, engine_of, logits_of

N_NEW = 3
N_DRAWS = 500
VOCABULARY = 4
# The second has something to copy: its last three tokens stood there before.
PROMPTS = ([1], [2, 0, 1, 3, 2, 0, 1])
PARAMS = ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9})
SMALL = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def small_model(vocab_size: int, n_layers: int, sureness: float = 2.0) -> PreTrainedModel:
    model = CASES["llama"].build(1, **SMALL, vocab_size=vocab_size, num_hidden_layers=n_layers)
    model.lm_head.weight.data *= sureness
    return model


def run_together(
    llm: LLM, drafter: Drafter, rule: str, batch: Sequence[TokenSequence], n_nodes: int
) -> list[list[int]]:
    """Continue sequences in one batch with trees of up to n_nodes; returns the new tokens."""
    engine = engine_of(llm, drafter, load_rule(rule), n_nodes * len(batch))
    for sequence in batch:
        engine.add(sequence)
    while engine.step():
        pass
    return [sequence.tokens[sequence.n_prompt :] for sequence in batch]


class OverAnswer(LogitsProcessor):
    """The penalties of OpenAI's API, by the tokens of the answer."""

    def __init__(self, n_prompt: int, presence: float, frequency: float) -> None:
        self._given = n_prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        n_prompt, presence, frequency = self._given
        scores = scores.clone()
        for row, ids in zip(scores, input_ids.tolist(), strict=True):
            for token, count in Counter(ids[n_prompt:]).items():
                row[token] -= count * frequency + presence
        return scores


def processors(params: SamplingParams, n_prompt: int = 0) -> LogitsProcessorList:
    """Return transformers' logits processors in vLLM's order; no filters at temperature 0."""
    chain = LogitsProcessorList()
    if params.logit_bias:
        biases = {(token,): float(bias) for token, bias in params.logit_bias.items()}
        chain.append(SequenceBiasLogitsProcessor(biases))
    chain.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty or 1.0))
    chain.append(OverAnswer(n_prompt, params.presence_penalty, params.frequency_penalty))
    if params.bad_words_ids:
        chain.append(NoBadWordsLogitsProcessor([[*word] for word in params.bad_words_ids]))
    if params.allowed_token_ids:
        allowed = [*params.allowed_token_ids]
        chain.append(PrefixConstrainedLogitsProcessor(lambda *_: allowed, 1))
    if params.min_tokens:
        ends = [*params.stop_token_ids]
        chain.append(MinNewTokensLengthLogitsProcessor(n_prompt, params.min_tokens, ends))
    if params.temperature:
        chain.append(TemperatureLogitsWarper(params.temperature))
        chain += [TopKLogitsWarper(params.top_k)] if params.top_k else []
        chain += [TopPLogitsWarper(params.top_p)] if params.top_p else []
        chain += [MinPLogitsWarper(params.min_p)] if params.min_p else []
    return chain


def exact_distribution(
    model: PreTrainedModel, prompt: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """The probability of each text of N_NEW tokens, (vocabulary,) * N_NEW."""
    vocab_size = model.config.vocab_size
    warpers = processors(params, len(prompt))
    probs = np.ones((vocab_size,) * N_NEW)
    for text in itertools.product(range(vocab_size), repeat=N_NEW - 1):
        logits = logits_of(model, [*prompt, *text])
        for n in range(N_NEW):
            before = torch.tensor([[*prompt, *text[:n]]])
            scores = warpers(before, logits[None, before.shape[1] - 1])
            next_probs = torch.softmax(scores.double(), -1)[0].numpy()
            probs[text] *= next_probs[text[n]] if n < N_NEW - 1 else next_probs
    assert abs(probs.sum() - 1) < 1e-6
    return probs


def assert_distribution(texts: Iterable[Sequence[int]], probs: np.ndarray) -> None:
    counted = [tuple(text) for text in texts]
    assert (len(counted) * probs >= 8).sum() > 9, "too few texts to tell distributions apart"
    assert_drawn(counted, dict(np.ndenumerate(probs)))


def assert_sampled_texts(
    llm: LLM, drafter: Drafter, rule: str, n_nodes: int, model: PreTrainedModel
) -> None:
    """Draw N_DRAWS texts per prompt, each with its own seed, in batches of both prompts."""
    texts: list[list[int]] = []
    for start in range(0, 2 * N_DRAWS, 100):
        batch = [
            TokenSequence([*PROMPTS[i % 2]], SamplingParams(N_NEW, seed=i, **PARAMS[i % 2]), 64)
            for i in range(start, start + 100)
        ]
        texts += run_together(llm, drafter, rule, batch, n_nodes)
    for i, prompt in enumerate(PROMPTS):
        probs = exact_distribution(model, prompt, SamplingParams(**PARAMS[i]))
        assert_distribution(texts[i::2], probs)

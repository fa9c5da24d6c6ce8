"""Conversations that a chat model writes itself, as training data of its drafts.

User turns are sampled after the chat template's user header (Magpie, arXiv 2406.08464). A batch
loop in torch writes them: attention of `LLM.generate` runs sequence by sequence, which takes three
times as long with 192 short sequences.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

# Openings of half of the user turns: common tasks, without content.
OPENINGS = (
    "Translate", "Summarize", "Write", "Explain", "Who", "What", "When", "Where", "Why", "How",
    "How many", "Read the following passage", "Answer", "Given the following", "Calculate",
    "Use the text below", "Rewrite", "List", "Compare", "Describe", "If", "A", "Can you", "Which",
    "Create", "Imagine", "Solve", "Write a Python function", "Summarize the following article:",
    "Using the following information, answer the question:",
)  # fmt: skip
# Most probable tokens from which a token is drawn.
TOP_K = 200
# Share of different 4-grams below which a text repeats itself.
DISTINCT = 0.7


@dataclass(frozen=True)
class Turn:
    """Tokens of a conversation.

    tokens    prompt and answer
    n_prompt  tokens of the prompt
    """

    tokens: list[int]
    n_prompt: int


def repeats(tokens: list[int]) -> bool:
    """Return whether a text repeats its 4-grams."""
    grams = list(zip(*(tokens[i:] for i in range(4)), strict=False))
    return len(set(grams)) < DISTINCT * len(grams)


class BatchWriter:
    """Greedy or sampled continuation of many prompts of similar length."""

    def __init__(self, target: LlamaForCausalLM, end: int) -> None:
        """Create a writer whose answers end with the token `end`."""
        self._target = target
        config = target.config
        self._n_kv = config.num_key_value_heads
        self._group = config.num_attention_heads // self._n_kv
        self._dim = config.head_dim
        self._end = end
        self._device = target.device

    @torch.no_grad()
    def write(
        self, prompts: list[list[int]], temperatures: Tensor, n_new: int, unfinished: float = 0.05
    ) -> list[list[int]]:
        """Return the continuation of each prompt, with its end token, or of `n_new` tokens.

        temperatures  (prompts,); 0 selects the most probable token
        unfinished    share of the prompts whose continuation may be cut short to save time
        """
        length = max(map(len, prompts))
        tokens = torch.full((len(prompts), length), self._end)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[length - len(prompt) :] = torch.tensor(prompt)
        tokens = tokens.to(self._device)
        temperatures = temperatures.to(self._device)
        pad = torch.tensor([length - len(prompt) for prompt in prompts], device=self._device)
        shape = (len(prompts), self._n_kv, length + n_new, self._dim)
        dtype = self._target.dtype
        caches = [
            tuple(torch.empty(shape, dtype=dtype, device=self._device) for _ in "kv")
            for _ in self._target.model.layers
        ]
        written: list[list[int]] = [[] for _ in prompts]
        owner = torch.arange(len(prompts), device=self._device)
        is_alive = torch.ones_like(owner, dtype=torch.bool)
        start = 0
        new = tokens
        for _ in range(n_new):
            logits = self._forward(new, start, pad, caches)
            start += new.shape[1]
            chosen = self._choose(logits, temperatures)
            for i, token in zip(owner.tolist(), chosen.tolist(), strict=True):
                written[i].append(token)
            is_alive &= chosen != self._end
            if is_alive.sum() <= unfinished * len(prompts):
                break
            new = chosen[:, None]
            # Ended rows go on until the batch is compacted.
            if is_alive.float().mean() < 0.85:
                owner, pad, temperatures, new = (
                    part[is_alive] for part in (owner, pad, temperatures, new)
                )
                caches = [(k[is_alive], v[is_alive]) for k, v in caches]
                is_alive = is_alive[is_alive]
        return [self._cut(row) for row in written]

    def _choose(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """Draw a token of each row (rows,) from its `TOP_K` most probable tokens."""
        values, tokens = logits.topk(min(TOP_K, logits.shape[-1]))
        noise = torch.empty_like(values).exponential_().log().neg()
        # argmax(logits + T * Gumbel noise) draws from softmax(logits / T).
        best = (values + temperatures[:, None] * noise).argmax(-1, keepdim=True)
        return tokens.gather(1, best)[:, 0]

    def _cut(self, row: list[int]) -> list[int]:
        return row[: row.index(self._end) + 1] if self._end in row else row

    def _forward(
        self, new: Tensor, start: int, pad: Tensor, caches: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the logits (rows, vocabulary) after the last token of new (rows, n)."""
        model = self._target.model
        rows, n = new.shape
        places = torch.arange(start, start + n, device=self._device)
        x = model.embed_tokens(new)
        rope = model.rotary_emb(x, (places - pad[:, None]).clamp(min=0))
        seen = torch.arange(start + n, device=self._device)
        is_seen = (seen <= places[:, None]) & (seen >= pad[:, None, None])
        is_seen |= seen == places[:, None]  # padding sees itself
        mask = torch.zeros_like(is_seen, dtype=x.dtype).masked_fill(~is_seen, -torch.inf)
        mask = mask[:, None].repeat_interleave(self._group, 2)
        for layer, (keys, values) in zip(model.layers, caches, strict=True):
            attention = layer.self_attn
            h = layer.input_layernorm(x)
            q, k, v = (
                project(h).view(rows, n, -1, self._dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rope)
            keys[:, :, start : start + n] = k
            values[:, :, start : start + n] = v
            # The queries of a group are rows of one attention per key-value head.
            q = q.unflatten(1, (self._n_kv, self._group)).transpose(2, 3).flatten(2, 3)
            out = F.scaled_dot_product_attention(
                q, keys[:, :, : start + n], values[:, :, : start + n], mask
            )
            out = out.unflatten(2, (n, self._group)).permute(0, 2, 1, 3, 4).flatten(2)
            x = x + attention.o_proj(out)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = model.norm(x[:, -1])
        return F.linear(last, self._target.lm_head.weight).float()


def user_turns(
    tokenizer: PreTrainedTokenizerBase, writer: BatchWriter, batch: int, n_new: int
) -> Iterator[list[int]]:
    """Sample user turns without end: complete ones that do not repeat themselves."""
    header = chat_header(tokenizer)
    while True:
        picks = torch.randint(2 * len(OPENINGS), (batch,)).tolist()
        openings = [tokenizer(OPENINGS[i]).input_ids if i < len(OPENINGS) else [] for i in picks]
        temperatures = 0.7 + 0.4 * torch.rand(batch)
        for opening, text in zip(
            openings, writer.write([header + o for o in openings], temperatures, n_new), strict=True
        ):
            turn = opening + text[:-1]
            if text[-1] == tokenizer.eos_token_id and len(turn) > 4 and not repeats(turn):
                yield turn


def chat_header(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of the chat template before the user's first word."""
    mark = "\ufffc"
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer(text[: text.index(mark)], add_special_tokens=False).input_ids


def chat_prompt(tokenizer: PreTrainedTokenizerBase, turn: list[int]) -> list[int]:
    """Return the tokens of a prompt with a user turn."""
    mark = "\ufffc"
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    tail = tokenizer(text[text.index(mark) + len(mark) :], add_special_tokens=False).input_ids
    return chat_header(tokenizer) + turn + tail


def conversations(
    tokenizer: PreTrainedTokenizerBase, writer: BatchWriter, batch: int, n_new: int
) -> Iterator[list[Turn]]:
    """Write batches of conversations: a greedy answer to each turn, and one sampled at 0.7 to 1."""
    turns = user_turns(tokenizer, writer, batch, 256)
    while True:
        began = time.monotonic()
        # Sort four batches by length: a batch then has little padding.
        prompts = sorted((chat_prompt(tokenizer, next(turns)) for _ in range(4 * batch)), key=len)
        print(f"{len(prompts)} user turns in {time.monotonic() - began:.0f} s", flush=True)
        for first in range(0, len(prompts), batch):
            part = prompts[first : first + batch]
            greedy = writer.write(part, torch.zeros(len(part)), n_new)
            sampled = writer.write(part, 0.7 + 0.3 * torch.rand(len(part)), n_new)
            yield [
                Turn(prompt + answer, len(prompt))
                for answers in (greedy, sampled)
                for prompt, answer in zip(part, answers, strict=True)
            ]

"""Prompts: questions through a chat template, or held-out text of the demonstration pair."""

import re
import sysconfig
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bench.common.measure import ROOT
from offload_rt.text.detokenize import encode_chat

_LONG_TEXT = ROOT / "LICENSE"
# Kinds of Spec-Bench: explanation, code, translation, summary, arithmetic, facts, writing.
QUESTIONS = (
    "How do plants make food from sunlight?",
    "Write a Python function that counts the words of a text.",
    "Translate to French: The library opens at nine and closes at six in the evening.",
    "Anna has 12 apples, gives 5 to Ben and buys 8 more. How many does she have? Explain.",
    "Why is the sky blue?",
    "Summarise in one sentence: The river rose after three days of rain, and the village moved its"
    " market to the hill, where it stayed until spring.",
    "Give me a recipe for rice with vegetables.",
    "Write a short letter that thanks a neighbour for watering the plants.",
)
_DEFINITION = re.compile(r"^(?:    )?(?:def|class) ", re.MULTILINE)


def chat_prompts(
    tokenizer: PreTrainedTokenizerBase, n: int, n_tokens: int | None = None
) -> list[list[int]]:
    """Return n questions as prompts of a chat.

    n_tokens  of each prompt, whose user turn begins with a part of a long text; default: of the
              question
    """

    def encoded(text: str) -> list[int]:
        turns = [{"role": "user", "content": text}]
        return encode_chat(tokenizer, turns, {"add_generation_prompt": True})

    prompts = [encoded(QUESTIONS[i % len(QUESTIONS)]) for i in range(n)]
    if n_tokens is None:
        return prompts
    pairs = zip(prompts[0], encoded("#"), strict=False)
    at = next(i for i, (token, mark) in enumerate(pairs) if token != mark)
    text = tokenizer(_LONG_TEXT.read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    return [
        [*ids[:at], *text[100 * i : 100 * i + n_tokens - len(ids)], *ids[at:]]
        for i, ids in enumerate(prompts)
    ]


def held_out_modules() -> list[str]:
    """Return the texts of modules of the standard library that no demonstration model knows."""
    names = (ROOT / "models/held_out.txt").read_text(encoding="utf-8").split()
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [(folder / name).read_text(encoding="utf-8") for name in names]


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, n: int, n_tokens: int = 64
) -> list[list[int]]:
    """Return n prompts of `n_tokens` tokens from evenly spaced definitions in held-out modules."""
    modules = held_out_modules()
    starts = [(text, match.start()) for text in modules for match in _DEFINITION.finditer(text)]
    prompts = []
    for i in range(n):
        text, start = starts[(2 * i + 1) * len(starts) // (2 * n)]
        prompts.append(tokenizer(text[start : start + 12 * n_tokens]).input_ids[:n_tokens])
    return prompts

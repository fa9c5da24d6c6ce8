"""Prompts from held-out text of the demonstration pair."""

import re
import sysconfig
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from bench.common.measure import ROOT

_HELD_OUT = ROOT / "models" / "held_out.txt"
_DEFINITION = re.compile(r"^(?:    )?(?:def|class) ", re.MULTILINE)


def held_out_prompts(
    tokenizer: PreTrainedTokenizerBase, n: int, n_tokens: int = 64
) -> list[list[int]]:
    """Return n prompts of `n_tokens` tokens from evenly spaced definitions in held-out modules."""
    starts = [
        (text, match.start())
        for text in (
            (Path(sysconfig.get_paths()["stdlib"]) / name).read_text(encoding="utf-8")
            for name in _HELD_OUT.read_text(encoding="utf-8").split()
        )
        for match in _DEFINITION.finditer(text)
    ]
    prompts = []
    for i in range(n):
        text, start = starts[(2 * i + 1) * len(starts) // (2 * n)]
        prompts.append(tokenizer(text[start : start + 12 * n_tokens]).input_ids[:n_tokens])
    return prompts

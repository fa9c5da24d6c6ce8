"""How accurate are the expected tokens of trees?

    python -m bench.speculate.predictions [--prompts 24] [--nodes 160]

Generate from held-out prompts with the resident demo pair and trees of a fixed size. Record
expected and accepted tokens of every tree, and correct them with each weight and memory of
`ExpectedTokensBias`. Errors are relative to the tokens of a text, averaged over texts.
"""

import itertools
from collections.abc import Sequence
from statistics import mean
from unittest import mock

from transformers import AutoTokenizer

from bench.common.checkpoints import DRAFT, TARGET, no_pair_stats
from bench.common.measure import Benchmark
from bench.common.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import ExpectedTokensBias

TEMPERATURES = (0.0, 0.6, 1.0)
WEIGHTS = (10.0, 30.0, 100.0)
MEMORIES = (0.95, 0.97, 0.98, 0.998)

# Uncorrected expected tokens and accepted tokens of each pass of a text.
Text = list[tuple[float, int]]


def texts(llm: LLM, prompts: Sequence[list[int]], n_new: int, temperature: float) -> list[Text]:
    """Return expected and accepted tokens of each pass of each prompt."""
    results: list[Text] = []
    observe = ExpectedTokensBias.observe

    def record(known: ExpectedTokensBias, expected: float, got: int) -> None:
        results[-1].append((expected, got))
        observe(known, expected, got)

    with mock.patch.object(ExpectedTokensBias, "observe", record):
        for i, prompt in enumerate(prompts):
            results.append([])
            params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
            llm.generate([prompt], params)
    return results


def error(texts: Sequence[Text], known: ExpectedTokensBias) -> float:
    """Return the mean relative error per text, with each pass corrected by earlier passes."""
    errors = []
    for text in texts:
        total = 0.0
        for expected, got in text:
            total += known.corrected(expected)
            known.observe(expected, got)
        errors.append(abs(total / sum(got for _, got in text) - 1))
    return mean(errors)


def main() -> None:
    """Print a line for each weight and memory."""
    bench = Benchmark("predictions", __doc__)
    bench.add("--prompts", type=int, default=24)
    bench.add("--tokens", type=int, default=96)
    bench.add("--nodes", type=int, default=160)
    flags = bench.start()
    print(f"error at T = {', '.join(map(str, TEMPERATURES))}")
    with no_pair_stats():
        prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
        with LLM(TARGET, DRAFT, device="cpu", tree_size=flags.nodes, max_model_len=512) as llm:
            by_temperature = [texts(llm, prompts, flags.tokens, t) for t in TEMPERATURES]
    figures = []
    for weight, memory in itertools.product(WEIGHTS, MEMORIES):
        errors = [error(part, ExpectedTokensBias(weight, memory)) for part in by_temperature]
        shares = ", ".join(f"{share:.1%}" for share in errors)
        print(f"weight {weight:5.0f}, memory {memory:.3f}: {shares}")
        figures.append({"weight": weight, "memory": memory, "errors": errors})
    bench.finish(figures=figures)


if __name__ == "__main__":
    main()

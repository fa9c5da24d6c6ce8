"""How far is the number of tokens that a run expects of its trees from the number it gets?

    python -m bench.predictions [--prompts 24] [--nodes 160]

The resident demo pair generates from held-out prompts with trees of one size. Expected and accepted
tokens of every tree are recorded, and corrected again (`ExpectedTokensBias`) with each weight and
memory. A figure is the error of the tokens expected of a whole text, as a share of its tokens,
averaged over the texts. The last line is one JSON object.
"""

import itertools
import os
from collections.abc import Sequence
from statistics import mean
from tempfile import TemporaryDirectory
from unittest import mock

from transformers import AutoTokenizer

from bench.measure import commit, flag_parser, machine, print_result
from bench.methods import DRAFT, TARGET
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.cost.tree_size import ExpectedTokensBias

TEMPERATURES = (0.0, 0.6, 1.0)
WEIGHTS = (10.0, 30.0, 100.0)
MEMORIES = (0.95, 0.97, 0.98, 0.998)

# Of one text: of each pass, the tokens expected before any correction, and those it gave.
Text = list[tuple[float, int]]


def texts(llm: LLM, prompts: Sequence[list[int]], n_new: int, temperature: float) -> list[Text]:
    """Expected and actual tokens of each pass of each prompt."""
    found: list[Text] = []
    observe = ExpectedTokensBias.observe

    def record(known: ExpectedTokensBias, expected: float, got: int) -> None:
        found[-1].append((expected, got))
        observe(known, expected, got)

    with mock.patch.object(ExpectedTokensBias, "observe", record):
        for i, prompt in enumerate(prompts):
            found.append([])
            llm.generate(
                [prompt], SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
            )
    return found


def error(found: Sequence[Text], known: ExpectedTokensBias) -> float:
    """Mean relative error of the tokens expected of a text, each pass corrected by the ones before
    it.
    """
    errors = []
    for text in found:
        total = 0.0
        for expected, got in text:
            total += known.corrected(expected)
            known.observe(expected, got)
        errors.append(abs(total / sum(got for _, got in text) - 1))
    return mean(errors)


def main() -> None:
    """Print a line for each weight and memory, and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=160)
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}; error at T = {', '.join(map(str, TEMPERATURES))}")
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # no statistics of the pair from earlier runs
        prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
        with LLM(TARGET, DRAFT, device="cpu", tree_size=flags.nodes, max_model_len=512) as llm:
            found = [texts(llm, prompts, flags.tokens, temperature) for temperature in TEMPERATURES]
    figures = []
    for weight, memory in itertools.product(WEIGHTS, MEMORIES):
        errors = [
            error(at_temperature, ExpectedTokensBias(weight, memory)) for at_temperature in found
        ]
        print(
            f"weight {weight:5.0f}, memory {memory:.3f}: "
            + ", ".join(f"{one:.1%}" for one in errors)
        )
        figures.append({"weight": weight, "memory": memory, "errors": errors})
    print_result("bias", flags, figures=figures)


if __name__ == "__main__":
    main()

"""Llama2-70B's shape on a card of 24 GB, with a draft of 7B's: seconds per token by trees, and
plain.

Both models compute the functions of the demonstration pair, so its acceptance is measured, not that
of Llama2.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from statistics import median

import torch
from transformers import AutoTokenizer

from bench.common.measure import ROOT
from bench.common.prompts import held_out_prompts
from bench.gpu.shapes import BUDGET, DRAFT, TARGET, opened, plan_of, written
from offload_rt import LLM, SamplingParams

EXPECTED_S = 220
# Timeline of a generation at temperature 0, for `offload-rt report` and Perfetto.
TRACE = ROOT / "build/generation.json"


@dataclass(frozen=True)
class Shapes:
    """What is measured; a test makes it small."""

    target: str = "llama-2-70b"
    n_layers: int = 80
    draft: str = "llama-2-7b"
    n_draft_layers: int = 32
    device_memory: str = BUDGET
    n_prompts: int = 1
    n_new: int = 96
    temperatures: tuple[float, ...] = (0.0, 0.6)


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Generations of some prompts, plain passes between them. The first prompt only fills the
    statistics of the pair.
    """
    target = written(TARGET, shapes.target)
    draft = written(DRAFT, shapes.draft)
    room = {"device_memory": shapes.device_memory, "max_model_len": 512}
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), shapes.n_prompts + 1)
    with opened(target, shapes.n_layers, (draft, shapes.n_draft_layers), **room) as llm:
        result = {"plan": plan_of(llm), "acceptance": "of the demonstration pair", "generation": []}
        for temperature in shapes.temperatures:
            for entry in _growing(llm, prompts, temperature, shapes.n_new):
                yield result | {"generation": [*result["generation"], entry]}
            result["generation"].append(entry)
            if temperature == 0:
                _trace(llm, prompts[-1], shapes.n_new)


def _trace(llm: LLM, prompt: list[int], n_new: int) -> None:
    """Generate once more and write the timeline."""
    trace = llm.engine.trace
    trace.on = True
    llm.generate(prompt, SamplingParams(max_new_tokens=n_new, temperature=0.0))
    trace.on = False
    TRACE.parent.mkdir(exist_ok=True)
    trace.write(TRACE)


def _growing(
    llm: LLM, prompts: list[list[int]], temperature: float, n_new: int
) -> Iterator[dict[str, object]]:
    """The figures after each prompt but the first."""
    runs = []
    plain = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_new_tokens=n_new, temperature=temperature, seed=i)
        before = torch.cuda.memory_stats().get("num_device_alloc", 0)
        stats = llm.generate(prompt, params)[0].stats
        if i == 0:
            continue
        # Each waits for all copies.
        n_allocations = torch.cuda.memory_stats().get("num_device_alloc", 0) - before
        runs.append({**asdict(stats), "n_allocations": n_allocations})
        plain += llm.time_plain(len(prompt), 1)
        per_token = median(run["measured_seconds_per_token"] for run in runs)
        seconds = {"plain_s": median(plain), "times_faster": median(plain) / per_token}
        yield {"temperature": temperature, **seconds, "runs": list(runs)}

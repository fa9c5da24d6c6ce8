"""Models that fit on the card: seconds per token plain and with trees, and a draft's level against
reading its weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

import torch
from transformers import AutoTokenizer

from bench.common.prompts import held_out_prompts
from bench.gpu.shapes import DRAFT, TARGET, opened, random_tree, written
from bench.gpu.timing import device_gbps
from offload_rt import LLM, SamplingParams

EXPECTED_S = 150


@dataclass(frozen=True)
class Shapes:
    """Targets with their layers and bytes; a test makes them small."""

    targets: tuple[tuple[str, int, float], ...] = (
        ("llama-2-7b", 32, 13.5e9), ("llama-2-13b", 40, 26.0e9), ("llama-33b", 60, 65.1e9),
    )  # fmt: skip
    n_new: int = 96
    widths: tuple[int, ...] = (1, 8, 32, 64, 128)


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """One entry for each shape, of those that leave a tenth of the free memory to caches and
    activations.
    """
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), 3)
    gbps = device_gbps()
    results: list[dict[str, object]] = []
    free, _ = torch.cuda.mem_get_info()
    for name, n, nbytes in shapes.targets:
        if nbytes < 0.9 * free:
            results.append(_shape(name, n, shapes, prompts, gbps))
        else:
            reason = f"{nbytes / 1e9:.0f} GB of weights, {free / 1e9:.0f} GB are free"
            results.append({"shape": name, "left out": reason})
        yield {"device_gbps": gbps, "shapes": results}


def _shape(
    name: str, n_layers: int, shapes: Shapes, prompts: list[list[int]], gbps: float
) -> dict[str, object]:
    model = written(TARGET, name)
    with opened(model, n_layers, (DRAFT, 3), max_model_len=512) as llm:
        floor_s = llm.plan.pass_bytes.computed / gbps / 1e9
        levels = {str(n): llm.time_passes(random_tree(n), 256, 10) for n in shapes.widths}
        rates = _rates(llm, prompts, shapes.n_new)
    return {"shape": name, "floor_s": floor_s, "levels": levels, **rates}


def _rates(llm: LLM, prompts: list[list[int]], n_new: int) -> dict[str, object]:
    stats = [
        llm.generate(prompt, SamplingParams(max_new_tokens=n_new))[0].stats for prompt in prompts
    ][1:]
    plain = median(llm.time_plain(len(prompts[0]), 20))
    per_token = median(run.measured_seconds_per_token for run in stats)
    return {
        "plain_s": plain, "seconds_per_token": per_token, "times_faster": plain / per_token,
        "tokens_per_pass": [run.tokens_per_pass for run in stats],
        "nodes": [run.nodes_per_tree for run in stats],
        "draft_share": [run.draft_seconds / run.seconds for run in stats],
    }  # fmt: skip

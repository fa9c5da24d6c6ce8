"""Llama2-70B's shape on a card of 24 GB: a pass against the link, by the size of its tree."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.gpu.shapes import BUDGET, TARGET, opened, park, plan_of, random_tree, written
from offload_rt.engine.profile import upload_gbps

EXPECTED_S = 90
# Of the copies that measure the link: the plan of an LLM leaves little of its budget.
_NBYTES = 64 << 20


@dataclass(frozen=True)
class Shapes:
    """What is measured; a test makes it small. The sizes of the README come first.

    settings  further settings of the LLM, such as the format on the link
    """

    target: str = "llama-2-70b"
    n_layers: int = 80
    device_memory: str = BUDGET
    n_nodes: tuple[int, ...] = (1, 768)
    context: int = 128
    settings: tuple[tuple[str, object], ...] = ()


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Pass times at every size, each with the rate of the link measured just before."""
    yield from measure_passes(written(TARGET, shapes.target), shapes, link_gbps)


def link_gbps(device: torch.device) -> float:
    """Measure GB/s of copies of pinned memory."""
    return upload_gbps(device, _NBYTES)


def measure_passes(
    target: Path, shapes: Shapes, rate_of: Callable[[torch.device], float]
) -> Iterator[dict[str, object]]:
    """Passes over a checkpoint; `rate_of` measures GB/s of the link while no layer crosses it."""
    room = {"device_memory": shapes.device_memory, "max_model_len": max(512, shapes.context + 2)}
    limits = {"drafter": "ngram", "tree_size": max(shapes.n_nodes), **room}
    with opened(target, shapes.n_layers, **limits, **dict(shapes.settings)) as llm:
        result = {"plan": plan_of(llm), "passes": []}
        for n in shapes.n_nodes:
            park(llm.engine.runner.streamer)
            gbps = rate_of(llm.engine.runner.device)
            times = llm.time_passes(random_tree(n), shapes.context, 3)
            floor_s = llm.plan.pass_bytes.at(shapes.context, n)["host"] / gbps / 1e9
            entry = {"rows": n, "seconds": times, "floor_s": floor_s, "link_gbps": gbps}
            result["passes"].append(entry)
            yield result

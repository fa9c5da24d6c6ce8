"""Llama2-70B's shape in 24 GiB of a card: a pass against the link, by the size of its tree."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.gpu.shapes import TARGET, opened, plan_of, random_tree, written
from offload_rt.engine.profile import upload_gbps

EXPECTED_S = 150


@dataclass(frozen=True)
class Shapes:
    """What is measured; a test makes it small. The sizes of the README come first."""

    target: str = "llama-2-70b"
    n_layers: int = 80
    device_memory: str = "24GiB"
    n_nodes: tuple[int, ...] = (1, 768, 64, 256, 512, 1024, 2048)


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Pass times at every size, each with the rate of the link measured just before."""
    room = {"device": "cuda", "dtype": "bfloat16", "device_memory": shapes.device_memory, "max_model_len": 512}
    limits = {"drafter": "ngram", "tree_size": max(shapes.n_nodes)}
    with opened(written(TARGET, shapes.target), shapes.n_layers, **limits, **room) as llm:
        found = {"plan": plan_of(llm), "passes": []}
        for n in shapes.n_nodes:
            gbps = upload_gbps(llm.engine.runner.device)
            times = llm.time_passes(random_tree(n), 128, 3)
            floor_s = llm.plan.streamed_nbytes / gbps / 1e9
            found["passes"].append({"rows": n, "seconds": times, "floor_s": floor_s, "link_gbps": gbps})
            yield found

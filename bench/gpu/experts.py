"""Mixtures of random weights that do not fit a card: whole layers, experts as rows touch them, and
some by the host.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from bench.common.measure import Spread
from bench.experts.mixtures import configs
from offload_rt import LLM, SamplingParams
from offload_rt.weights.checkpoint import Checkpoint

EXPECTED_S = 150
WHOLE, _, BY_HOST = WAYS = ("whole layers", "all moved", "host computes some")


@dataclass(frozen=True)
class Shapes:
    """What is measured; a test makes it small."""

    nbytes: int = 6 << 30
    device_memory: str = "3GiB"
    kinds: tuple[str, ...] = ("qwen3_moe", "mixtral")
    n_tokens: int = 24
    rounds: int = 3


def measure(shapes: Shapes = Shapes()) -> Iterator[dict[str, object]]:
    """Seconds per token each way, bytes that crossed the link for it, and whether its tokens were
    those of whole layers.

    In 16 bits a product of the host, or of one expert, may round differently, so they may part.
    """
    results: dict[str, object] = {}
    memory = Path("/dev/shm")
    for kind in shapes.kinds:
        home = (
            memory
            if memory.is_dir() and shutil.disk_usage(memory).free > 2 * shapes.nbytes
            else None
        )
        with TemporaryDirectory(dir=home) as folder:
            config = configs(shapes.nbytes)[kind]
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            texts: list[list[list[int]]] = []
            for way in WAYS:
                results[f"{kind}, {way}"] = _measured(Path(folder), way, shapes, texts)
                yield results


def _measured(
    folder: Path, way: str, shapes: Shapes, texts: list[list[list[int]]]
) -> dict[str, object]:
    with ExitStack() as stack:
        if way == WHOLE:
            stack.enter_context(patch.object(Checkpoint, "by_expert", lambda _: None))
        settings = {
            "device": "cuda",
            "device_memory": shapes.device_memory,
            "drafter": "none",
            "max_model_len": 128,
        }
        llm = stack.enter_context(LLM(str(folder), **settings))
        experts = llm.engine.runner.experts
        meter = llm.engine.runner.streamer.meter
        assert (experts is None) == (way == WHOLE), (
            "experts are blocks of their own, but where layers stay whole"
        )
        if experts is not None and experts.host is not None:
            experts.host.is_on = way == BY_HOST
        seconds = list[float]()
        nbytes = list[float]()
        said = list[list[int]]()
        for seed in range(shapes.rounds + 1):
            params = SamplingParams(
                max_tokens=shapes.n_tokens, temperature=1.0, seed=seed, ignore_eos=True
            )
            before = meter.read()[0]
            started = time.perf_counter()
            output = llm.generate([seed + 1, 5, 8, 2], params)[0]
            seconds.append((time.perf_counter() - started) / output.stats.n_passes)
            nbytes.append((meter.read()[0] - before) / output.stats.n_passes)
            said.append(list(output.token_ids))
        texts.append(said)
        times = experts.host.times if experts is not None and experts.host is not None else None
        return {
            "seconds": asdict(Spread.of(seconds[1:])), "nbytes": asdict(Spread.of(nbytes[1:])),
            "same": said == texts[0],
            "host_s": times and times.seconds[0], "n_slots": llm.plan.n_expert_slots,
        }  # fmt: skip

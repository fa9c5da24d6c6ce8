"""Mixtures of random weights that do not fit a card: whole layers, experts as rows touch them, and
some by the host.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from bench.common.measure import Spread
from bench.experts.__main__ import decode
from bench.experts.mixtures import configs
from bench.gpu.shapes import memory_folder
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
    for kind in shapes.kinds:
        with TemporaryDirectory(dir=memory_folder(2 * shapes.nbytes)) as folder:
            config = configs(shapes.nbytes)[kind]
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
            texts: list[list[list[int]]] = []
            for way in WAYS:
                results[f"{kind}, {way}"] = _measured(Path(folder), way, shapes, texts)
                yield results


def _measured(
    folder: Path, way: str, shapes: Shapes, texts: list[list[list[int]]]
) -> dict[str, object]:
    settings = {"device": "cuda", "device_memory": shapes.device_memory, "max_model_len": 128}
    with ExitStack() as stack:
        if way == WHOLE:
            stack.enter_context(patch.object(Checkpoint, "by_expert", lambda _: None))
        llm = stack.enter_context(LLM(str(folder), drafter="none", **settings))
        experts = llm.engine.runner.experts
        assert (experts is None) == (way == WHOLE), "experts are blocks, unless layers are whole"
        host = experts and experts.host
        if host is not None:
            host.is_on = way == BY_HOST
        params = SamplingParams(max_tokens=shapes.n_tokens, temperature=1.0, ignore_eos=True)
        runs = [
            decode(llm, [seed + 1, 5, 8, 2], replace(params, seed=seed))
            for seed in range(shapes.rounds + 1)
        ]
        seconds, nbytes, said = map(list, zip(*runs, strict=True))
        texts.append(said)
        return {
            "seconds": asdict(Spread.of(seconds[1:])), "nbytes": asdict(Spread.of(nbytes[1:])),
            "same": said == texts[0],
            "host_s": host and host.times.seconds[0], "n_slots": llm.plan.n_expert_slots,
        }  # fmt: skip

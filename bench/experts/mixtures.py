"""Mixtures of random weights behind paced links."""

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from transformers import MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from bench.common.pacing import PacedTier, pace
from offload_rt import LLM
from offload_rt.config import EngineConfig
from offload_rt.offload.host_experts import HostExperts
from offload_rt.offload.memory import MemoryTier
from offload_rt.offload.tier import read_parallel
from offload_rt.weights.checkpoint import Checkpoint
from offload_rt.weights.layout import PackedLayer, host_block

STREAMED = ("whole layers", "touched experts")
BESIDE_HOST = ("always moved", "host computes")
_SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
    "dtype": "bfloat16",
}


def configs(nbytes: int) -> dict[str, PreTrainedConfig]:
    """Return configs of two mixtures with about this many bytes."""

    def n_layers(n_experts: int, width: int) -> int:
        return max(round(nbytes / (n_experts * 3 * width * _SHAPE["hidden_size"] * 2)), 2)

    fine = {"moe_intermediate_size": 384, "intermediate_size": 384}
    experts = {"num_experts": 128, "num_experts_per_tok": 8}
    n_coarse = n_layers(8, 3584)
    return {
        "mixtral": MixtralConfig(**_SHAPE, intermediate_size=3584, num_hidden_layers=n_coarse),
        "qwen3_moe": Qwen3MoeConfig(
            **_SHAPE, **fine, **experts, num_hidden_layers=n_layers(128, 384)
        ),
    }


def _open(folder: Path, memory: int) -> LLM:
    settings = {"device": "cpu", "drafter": "none", "max_model_len": 64}
    return LLM.open(EngineConfig(str(folder), device_memory=memory, **settings))


def open_paced(folder: Path, way: str, memory: int, gbps: float) -> LLM:
    """Open a model with layers and experts behind a shared link."""
    is_whole = way == STREAMED[0]
    with ExitStack() as stack:
        if is_whole:
            stack.enter_context(patch.object(Checkpoint, "by_expert", lambda _: None))
        llm = _open(folder, memory)
    assert (llm.spec.files.experts is None) == is_whole
    pace(llm, gbps)
    llm.load()
    return llm


def open_beside_host(folder: Path, way: str, memory: int, gbps: float) -> LLM:
    """Open a model with experts in memory behind a link, and a thread that may compute them."""
    llm = _open(folder, memory)
    files = llm.spec.files
    plan = llm.plan
    images = MemoryTier()
    assert files.experts is not None and plan.experts is not None
    with closing(files.experts) as tier:
        for i in range(len(tier.blocks)):
            images.put(i, PackedLayer(host_block(tier.layout(i).nbytes), tier.layout(i)))
            read_parallel(tier.reads(i, images.image(i).block), tier.n_parallel)
    llm.spec = replace(llm.spec, files=replace(files, experts=PacedTier(images, gbps)))
    llm.load()
    runner = llm.engine.runner
    copy_s = plan.experts.nbytes / gbps / 1e9
    view = partial(runner.format.view, dtype=runner.dtype)
    n_threads = torch.get_num_threads()
    host = HostExperts(images, view, copy_s, runner.device, n_threads)
    host.is_on = way == BESIDE_HOST[1]
    runner.experts.host = host
    return llm

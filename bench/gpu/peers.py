"""Accelerate and DeepSpeed on Llama2-70B's shape with the same budget of the card, by an expert's
settings.
"""

import gc
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.compare.peers.deepspeed import ALONE
from bench.gpu.shapes import BUDGET, TARGET, written
from bench.gpu.timing import CARD
from offload_rt.config import parse_size
from offload_rt.system.machine import memory_free
from offload_rt.weights.checkpoint import open_checkpoint

EXPECTED_S = 120
N_LAYERS = 80
N_TOKENS = 3
# DeepSpeed pins a copy of each layer, which takes longer than the measurement.
MOST_PINNED = 20


def measure() -> Iterator[dict[str, object]]:
    """Seconds per token of each, or why it failed. With Accelerate, all layers share one block of
    the host.
    """
    total = torch.cuda.mem_get_info(CARD)[1]
    torch.cuda.set_per_process_memory_fraction(parse_size(BUDGET) / total, CARD)
    results: dict[str, object] = {}
    for name, peer in (("accelerate", _accelerate), ("deepspeed", _deepspeed)):
        try:
            results[name] = peer()
        except Exception as error:  # a peer may raise anything
            results[name] = {"failed": " ".join(str(error).split())[:300]}
        yield results
        gc.collect()
        torch.cuda.empty_cache()


def _config() -> LlamaConfig:
    raw = LlamaConfig.from_pretrained(written(TARGET, "llama-2-70b"))
    raw.num_hidden_layers = N_LAYERS
    return raw


def _shared_weights(config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The weights of all layers, each being the one that changes nothing, pinned once."""
    from safetensors import safe_open

    checkpoint = open_checkpoint(written(TARGET, "llama-2-70b"))
    weights: dict[str, torch.Tensor] = {}
    for record in (*checkpoint.layers[-1], *checkpoint.non_layer):
        with safe_open(record.path, "pt") as file:
            weights[record.name] = file.get_tensor(record.name).to(torch.bfloat16).pin_memory()
    last = f"model.layers.{len(checkpoint.layers) - 1}."
    for name in [name for name in weights if name.startswith(last)]:
        for i in range(config.num_hidden_layers):
            weights[f"model.layers.{i}.{name.removeprefix(last)}"] = weights[name]
    return weights


def _accelerate() -> dict[str, object]:
    from accelerate import dispatch_model, infer_auto_device_map, init_empty_weights
    from accelerate.utils import set_module_tensor_to_device

    config = _config()
    with init_empty_weights():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = _shared_weights(config)
    room = {0: int(parse_size(BUDGET) * 0.85), "cpu": 1 << 40}
    places = infer_auto_device_map(
        model, room, no_split_module_classes=["LlamaDecoderLayer"], dtype=torch.bfloat16
    )
    for name, weight in weights.items():
        of_module = (places[key] for key in places if f"{name}.".startswith(f"{key}."))
        place = next(of_module, "cpu")
        if place == 0 and name in dict(model.named_parameters()):
            set_module_tensor_to_device(model, name, CARD, value=weight)
    model = dispatch_model(model, places, main_device=0, state_dict=weights, offload_buffers=False)
    return {"seconds_per_token": _seconds_per_token(model)}


def _deepspeed() -> dict[str, object]:
    """ZeRO-Inference pins a copy of every parameter: measured with few layers, and scaled."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = _config()
    layer_nbytes = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    config.num_hidden_layers = min(MOST_PINNED, int(memory_free() * 0.7 / layer_nbytes))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu", "pin_memory": True},
            "stage3_prefetch_bucket_size": layer_nbytes // 2,
            "stage3_max_live_parameters": int(3e9),
            "stage3_param_persistence_threshold": int(1e5),
        },
    }  # fmt: skip
    os.environ |= ALONE
    deepspeed.init_distributed("nccl")
    kept = HfDeepSpeedConfig(settings)  # transformers builds the model in parts while this is alive
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    deepspeed.utils.set_z3_leaf_modules(model, [LlamaDecoderLayer])
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    seconds = _seconds_per_token(engine.module) * N_LAYERS / config.num_hidden_layers
    del kept
    return {"seconds_per_token": seconds, "layers_measured": config.num_hidden_layers}


def _seconds_per_token(model: LlamaForCausalLM) -> float:
    ids = torch.zeros(1, 128, dtype=torch.int64, device=CARD)
    moments = []

    class Clock:
        def put(self, _: torch.Tensor) -> None:
            torch.cuda.synchronize()
            moments.append(time.perf_counter())

        def end(self) -> None:
            pass

    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=N_TOKENS + 1,
            max_new_tokens=N_TOKENS + 1,
            do_sample=False, pad_token_id=0, streamer=Clock(),
        )  # fmt: skip
    # the first is the prompt's
    return median(after - before for before, after in pairwise(moments[1:]))

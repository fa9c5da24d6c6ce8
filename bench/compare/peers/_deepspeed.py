"""Shared parts of DeepSpeed's two offloads: ZeRO stage 3 in one process, layers fetched ahead."""

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from bench.compare.contract import Job, Supply
from bench.compare.peers._transformers import TransformersPeer

PACKAGES = ("transformers", "accelerate", "deepspeed")
_ALONE = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29517",
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
}


class DeepSpeedPeer(TransformersPeer):
    """A transformers model with parameters gathered by an engine of DeepSpeed.

    settings  the `HfDeepSpeedConfig`, which must stay alive for transformers to use ZeRO-3
    """

    def __init__(self, engine: object, supply: Supply, settings: object) -> None:
        super().__init__(engine.module, supply)
        self._kept = engine, settings

    def close(self) -> None:
        """Leave the group of one process."""
        torch.distributed.destroy_process_group()


def open_engine(job: Job, offload: dict[str, object], source: str) -> DeepSpeedPeer:
    """Open the model with stage 3.

    offload  the `offload_param` section
    source   source of the weights; see `Supply`
    """
    os.environ.update(_ALONE)
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    # Not at the top: it reads the environment variables above when it is imported.
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    config = AutoConfig.from_pretrained(job.plain)
    settings = _settings(config, offload)
    kept = HfDeepSpeedConfig(settings)
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(job.plain, dtype="auto").eval()
    # Fetch complete layers instead of their nine tensors separately.
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
    n_moved = (
        sum(parameter.ds_numel for parameter in model.parameters())
        - model.get_input_embeddings().weight.ds_numel
    )
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    return DeepSpeedPeer(engine, Supply(source, n_moved * config.dtype.itemsize), kept)


def layer_numel(config: PretrainedConfig) -> int:
    """Parameters of one decoder layer of a Llama."""
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_attention_heads)
    return attention + 3 * config.hidden_size * config.intermediate_size + 2 * config.hidden_size


def _settings(config: PretrainedConfig, offload: dict[str, object]) -> dict[str, object]:
    """Prefetching about one layer: DeepSpeed's default bucket is smaller than one matrix of a large
    model.
    """
    layer = layer_numel(config)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 1 << 30,
        "bf16": {"enabled": config.dtype == torch.bfloat16},
        "fp16": {"enabled": config.dtype == torch.float16},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload,
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": layer,
            "stage3_max_live_parameters": 3 * layer + config.vocab_size * config.hidden_size,
            "stage3_max_reuse_distance": 0,
            # Norms stay where they are; matrices never do.
            "stage3_param_persistence_threshold": 2 * config.hidden_size,
        },
    }

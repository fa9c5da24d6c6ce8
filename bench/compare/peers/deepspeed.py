"""DeepSpeed ZeRO-Inference with the weights in CPU memory, or on the disk, read by its asynchronous
direct I/O: stage 3 in one process, layers fetched ahead.

Without a GPU, CPU and device memory are the same: the result is the cost of stage 3.
`python -m bench.compare.peers.deepspeed` compiles its extensions.
"""

import os
import shutil
import subprocess
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from bench.compare.contract import Job, Supply, System
from bench.compare.peers.transformers import TransformersPeer

PACKAGES = ("transformers", "accelerate", "deepspeed")
# Environment of a group of one process.
ALONE = {
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
    os.environ.update(ALONE)
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
    n_embedded = model.get_input_embeddings().weight.ds_numel
    n_moved = sum(parameter.ds_numel for parameter in model.parameters()) - n_embedded
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


def _load_cpu(job: Job) -> DeepSpeedPeer:
    """Pinned where there is a GPU to copy to."""
    has_gpu = torch.cuda.is_available()
    offload = {"device": "cpu", "pin_memory": has_gpu}
    return open_engine(job, offload, "host" if has_gpu else "memory")


def _load_nvme(job: Job) -> DeepSpeedPeer:
    """Buffers for the largest tensor, enough of them for two layers."""
    config = AutoConfig.from_pretrained(job.plain)
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    offload = {
        "device": "nvme",
        "nvme_path": str(job.scratch),
        "pin_memory": torch.cuda.is_available(),
        "buffer_count": 18,
        "buffer_size": largest,
    }
    return open_engine(job, offload, "disk")


def _lacks_io() -> str | None:
    """Its I/O is an extension that is compiled on first use, against libaio."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "its I/O extension needs g++, which is not installed"
    # As its own build finds it: where the compiler looks, CPATH and LIBRARY_PATH included.
    probe = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    built = subprocess.run(
        probe, input=b"#include <libaio.h>\nint main() {}", capture_output=True, check=False
    )
    lacking = "its I/O extension needs libaio (libaio-dev), which is not installed"
    return lacking if built.returncode else None


def _compile() -> None:
    """Compile the extensions, which takes minutes, before a run with a time limit."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    for name in ("AsyncIOBuilder", "ShareMemCommBuilder"):
        get_accelerator().create_op_builder(name).load()


PEERS = {
    "deepspeed_cpu": System("DeepSpeed ZeRO-Inference, CPU", _load_cpu, PACKAGES),
    "deepspeed_nvme": System(
        "DeepSpeed ZeRO-Inference, NVMe", _load_nvme, PACKAGES, unfit=_lacks_io
    ),
}

if __name__ == "__main__":
    if (reason := _lacks_io()) is not None:
        sys.exit(reason)
    _compile()

"""DeepSpeed ZeRO-Inference with the weights on the disk, read by its asynchronous direct I/O."""

from ctypes.util import find_library
from pathlib import Path

import torch
from transformers import AutoConfig

from scripts.peers import _deepspeed
from scripts.peers._contract import Job

TITLE, PACKAGES = "DeepSpeed ZeRO-Inference, NVMe", _deepspeed.PACKAGES
_HEADER = Path("/usr/include/libaio.h")


def unfit() -> str | None:
    """Its I/O is an extension that is compiled on first use."""
    if find_library("aio") is None or not _HEADER.exists():
        return "its I/O extension needs libaio (libaio-dev), which is not installed"
    return None


def load(job: Job) -> _deepspeed.DeepSpeedPeer:
    """Buffers for the largest tensor, enough of them for two layers."""
    config = AutoConfig.from_pretrained(job.model)
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    offload = {
        "device": "nvme",
        "nvme_path": str(job.scratch),
        "pin_memory": torch.cuda.is_available(),
        "buffer_count": 18,
        "buffer_size": largest,
    }
    return _deepspeed.open_engine(job, offload, "disk")

"""DeepSpeed ZeRO-Inference with the weights on the disk, read by its asynchronous direct I/O."""

import os
import shutil
import subprocess
import sys

import torch
from transformers import AutoConfig

from bench.compare.contract import Job
from bench.compare.peers import _deepspeed as deepspeed

TITLE = "DeepSpeed ZeRO-Inference, NVMe"
PACKAGES = deepspeed.PACKAGES
DRAFTS = False


def unfit() -> str | None:
    """Its I/O is an extension that is compiled on first use, against libaio."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "its I/O extension needs g++, which is not installed"
    # As its own build finds it: where the compiler looks, CPATH and LIBRARY_PATH included.
    probe = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    built = subprocess.run(
        probe, input=b"#include <libaio.h>\nint main() {}", capture_output=True, check=False
    )
    return (
        "its I/O extension needs libaio (libaio-dev), which is not installed"
        if built.returncode
        else None
    )


def load(job: Job) -> deepspeed.DeepSpeedPeer:
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
    return deepspeed.open_engine(job, offload, "disk")


def _compile() -> None:
    """Compile the extensions, which takes minutes, before a run with a time limit."""
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.accelerator import get_accelerator

    for name in ("AsyncIOBuilder", "ShareMemCommBuilder"):
        get_accelerator().create_op_builder(name).load()


if __name__ == "__main__":
    if (reason := unfit()) is not None:
        sys.exit(reason)
    _compile()

"""DeepSpeed ZeRO-Inference with the weights in CPU memory.

On a machine without a GPU both memories are the same: what is measured is what stage 3 costs.
"""

import torch

from scripts.peers import _deepspeed
from scripts.peers._contract import Job

TITLE, PACKAGES = "DeepSpeed ZeRO-Inference, CPU", _deepspeed.PACKAGES


def unfit() -> str | None:
    """It needs a compiler for its extensions, if anything."""
    return None


def load(job: Job) -> _deepspeed.DeepSpeedPeer:
    """Pinned where there is a GPU to copy to."""
    has_gpu = torch.cuda.is_available()
    offload = {"device": "cpu", "pin_memory": has_gpu}
    return _deepspeed.open_engine(job, offload, "host" if has_gpu else "memory")

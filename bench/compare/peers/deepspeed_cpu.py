"""DeepSpeed ZeRO-Inference with the weights in CPU memory.

Without a GPU both memories are the same, so the result is the cost of stage 3.
"""

import torch

from bench.compare.contract import Job
from bench.compare.peers import _deepspeed as deepspeed

TITLE = "DeepSpeed ZeRO-Inference, CPU"
PACKAGES = deepspeed.PACKAGES
DRAFTS = False


def load(job: Job) -> deepspeed.DeepSpeedPeer:
    """Pinned where there is a GPU to copy to."""
    has_gpu = torch.cuda.is_available()
    offload = {"device": "cpu", "pin_memory": has_gpu}
    return deepspeed.open_engine(job, offload, "host" if has_gpu else "memory")

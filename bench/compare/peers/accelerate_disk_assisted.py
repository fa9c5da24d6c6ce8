"""Accelerate's disk offload with transformers' assisted generation: the draft is resident and paid
for by resident layers.
"""

import json
from math import ceil

import torch
from transformers import AutoModelForCausalLM

from bench.compare.contract import Job
from bench.compare.peers import accelerate_disk
from bench.compare.peers._transformers import TransformersPeer

TITLE = "Accelerate, disk offload, assisted"
PACKAGES = accelerate_disk.PACKAGES
DRAFTS = True


def load(job: Job) -> TransformersPeer:
    """The number of drafted tokens follows the draft's confidence, as is transformers' default."""
    draft = AutoModelForCausalLM.from_pretrained(job.draft, dtype="auto")
    draft = draft.to("cuda" if torch.cuda.is_available() else "cpu")
    n_layers = json.loads((job.plain / "config.json").read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    model_nbytes = sum(path.stat().st_size for path in job.plain.glob("*.safetensors"))
    draft_nbytes = sum(
        parameter.numel() * parameter.element_size() for parameter in draft.parameters()
    )
    n_displaced = ceil(draft_nbytes / (model_nbytes / n_layers))
    return accelerate_disk.offloaded(job, max(job.n_resident - n_displaced, 0), draft)

"""Accelerate's disk offload: shards are read in place, complete layers stay in memory up to the
budget.

The page cache is emptied before every pass, as a machine with less memory than the model would do.
"""

import json
import tempfile

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.compare.contract import Job, Supply
from bench.compare.peers._transformers import TransformersPeer, layer_nbytes

TITLE = "Accelerate, disk offload"
PACKAGES = ("transformers", "accelerate")
DRAFTS = False


def load(job: Job) -> TransformersPeer:
    """Keep as many layers resident as all other peers."""
    return offloaded(job, job.n_resident)


def offloaded(job: Job, n_resident: int, draft: PreTrainedModel | None = None) -> TransformersPeer:
    """The first layers resident and the rest on the disk, in one device map: no `.dat` copies are
    written.
    """
    n_layers = json.loads((job.plain / "config.json").read_text(encoding="utf-8"))[
        "num_hidden_layers"
    ]
    here = 0 if torch.cuda.is_available() else "cpu"
    where = {f"model.layers.{i}": here if i < n_resident else "disk" for i in range(n_layers)}
    where |= dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), here
    )
    folder = tempfile.mkdtemp(dir=job.scratch)
    model = AutoModelForCausalLM.from_pretrained(
        job.plain, device_map=where, offload_folder=folder, dtype="auto"
    )
    supply = Supply("disk", (n_layers - n_resident) * layer_nbytes(model))
    return TransformersPeer(model, supply, cold=job.plain, assistant=draft)

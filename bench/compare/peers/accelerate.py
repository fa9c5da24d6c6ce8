"""Accelerate's offloads. Disk: shards are read in place, complete layers stay in memory up to the
budget. CPU: weights are in CPU memory and come to the device layer by layer.

The page cache is emptied before every pass over the disk, as a machine with less memory than the
model would do. Without a GPU, CPU and device memory are the same: the result is the cost of hooks.
"""

import json
import tempfile
from functools import partial
from math import ceil

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.compare.contract import Job, Supply, System
from bench.compare.peers.transformers import (
    TransformersPeer,
    device,
    layer_nbytes,
    load_draft,
    nbytes,
)


def _load_disk(job: Job, is_assisted: bool) -> TransformersPeer:
    """The first layers resident and the rest on the disk, in one device map: no `.dat` copies are
    written. A draft is resident and paid for by resident layers.
    """
    config = json.loads((job.plain / "config.json").read_text(encoding="utf-8"))
    n_layers = config["num_hidden_layers"]
    n_resident = job.n_resident
    draft = load_draft(job) if is_assisted else None
    if draft is not None:
        model_nbytes = sum(path.stat().st_size for path in job.plain.glob("*.safetensors"))
        draft_nbytes = sum(parameter.nbytes for parameter in draft.parameters())
        n_resident = max(n_resident - ceil(draft_nbytes / (model_nbytes / n_layers)), 0)
    here = 0 if torch.cuda.is_available() else "cpu"
    where = {f"model.layers.{i}": here if i < n_resident else "disk" for i in range(n_layers)}
    tables = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    where |= dict.fromkeys(tables, here)
    folder = tempfile.mkdtemp(dir=job.scratch)
    model = AutoModelForCausalLM.from_pretrained(
        job.plain, device_map=where, offload_folder=folder, dtype="auto"
    )
    supply = Supply("disk", (n_layers - n_resident) * layer_nbytes(model))
    return TransformersPeer(model, supply, cold=job.plain, assistant=draft)


def _load_cpu(job: Job) -> TransformersPeer:
    """All weights in CPU memory; on a GPU pinned, and whole layers resident as far as the budget
    goes.
    """
    # not at the top: the title is needed where it is not installed
    from accelerate import cpu_offload

    model = AutoModelForCausalLM.from_pretrained(job.plain, dtype="auto")
    if device() == "cpu":
        moved = nbytes(model)
        cpu_offload(model, execution_device=torch.device("cpu"), state_dict=model.state_dict())
        return TransformersPeer(model, Supply("memory", moved))
    return _on_cuda(model, job)


def _on_cuda(model: PreTrainedModel, job: Job) -> TransformersPeer:
    from accelerate import dispatch_model, infer_auto_device_map

    # Tensors that were not pinned are copied at a fraction of the link's rate, and the host waits
    # for each.
    pinned = {name: tensor.pin_memory() for name, tensor in model.state_dict().items()}
    where = infer_auto_device_map(
        model,
        max_memory={0: job.budget, "cpu": 1 << 42},
        no_split_module_classes=model._no_split_modules,
    )
    layers = range(len(model.model.layers))
    n_streamed = sum(where.get(f"model.layers.{i}") == "cpu" for i in layers)
    moved = n_streamed * layer_nbytes(model)
    dispatch_model(model, where, main_device=0, state_dict=pinned)
    return TransformersPeer(model, Supply("host", moved))


PACKAGES = ("transformers", "accelerate")
PEERS = {
    "accelerate_cpu": System("Accelerate, CPU offload", _load_cpu, PACKAGES),
    "accelerate_disk": System(
        "Accelerate, disk offload", partial(_load_disk, is_assisted=False), PACKAGES
    ),
    "accelerate_disk_assisted": System(
        "Accelerate, disk offload, assisted", partial(_load_disk, is_assisted=True), PACKAGES,
        drafts=True,
    ),
}  # fmt: skip

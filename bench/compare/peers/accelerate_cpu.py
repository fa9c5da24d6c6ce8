"""Accelerate's CPU offload: weights in CPU memory, brought to the device layer by layer.

Without a GPU both are the same memory, so the result is the cost of its hooks.
"""

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.compare.contract import Job, Supply
from bench.compare.peers._transformers import TransformersPeer, layer_nbytes, nbytes

TITLE = "Accelerate, CPU offload"
PACKAGES = ("transformers", "accelerate")
DRAFTS = False


def load(job: Job) -> TransformersPeer:
    """All weights in CPU memory; on a GPU pinned, and whole layers resident as far as the budget
    goes.
    """
    # not at the top: the title is needed where it is not installed
    from accelerate import cpu_offload

    model = AutoModelForCausalLM.from_pretrained(job.plain, dtype="auto")
    if not torch.cuda.is_available():
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
    n_streamed = sum(
        where.get(f"model.layers.{i}") == "cpu" for i in range(len(model.model.layers))
    )
    moved = n_streamed * layer_nbytes(model)
    dispatch_model(model, where, main_device=0, state_dict=pinned)
    return TransformersPeer(model, Supply("host", moved))

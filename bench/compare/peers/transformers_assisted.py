"""transformers' assisted generation, target and draft both resident."""

import torch
from transformers import AutoModelForCausalLM

from bench.compare.contract import Job, Supply
from bench.compare.peers._transformers import TransformersPeer, nbytes

TITLE = "transformers, resident, assisted"
PACKAGES = ("transformers",)
DRAFTS = True


def load(job: Job) -> TransformersPeer:
    """All weights on the device; the number of drafted tokens follows the draft's confidence, as is
    the default.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, draft = (
        AutoModelForCausalLM.from_pretrained(path, dtype="auto") for path in (job.plain, job.draft)
    )
    return TransformersPeer(
        model.to(device), Supply("memory", nbytes(model)), assistant=draft.to(device)
    )

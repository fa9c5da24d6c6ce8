"""transformers with all weights in the memory of the device: the reference for the tokens, not for
the memory.
"""

import torch
from transformers import AutoModelForCausalLM

from bench.compare.contract import Job, Supply
from bench.compare.peers._transformers import TransformersPeer, nbytes

TITLE = "transformers, resident"
PACKAGES = ("transformers",)
DRAFTS = False


def load(job: Job) -> TransformersPeer:
    """Load all weights to the device, independent of the budget."""
    model = AutoModelForCausalLM.from_pretrained(job.plain, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return TransformersPeer(model, Supply("memory", nbytes(model)))

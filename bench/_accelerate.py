"""Accelerate's disk offload with an expert's settings, as a process of its own: the last line of its output is JSON.

The safetensors shards are read in place (no `.dat` copies), whole layers stay in memory as far as the budget goes, and the
page cache is emptied before every token: on a machine whose memory is smaller than the model it could not hold it either.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor

from bench._measure import drop_from_page_cache


class _ColdSteps(LogitsProcessor):
    """Notes when each token's logits are there, and makes the weights cold before the next, outside the time measured."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = time.perf_counter()
        self.seconds: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seconds.append(time.perf_counter() - self._started)
        drop_from_page_cache(self._directory)
        self._started = time.perf_counter()
        return scores


def main() -> None:
    """Generate greedily and print the seconds of each token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--resident-layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt-ids", required=True)
    flags = parser.parse_args()
    config = json.loads((flags.model / "config.json").read_text())
    where = {
        f"model.layers.{i}": "cpu" if i < flags.resident_layers else "disk" for i in range(config["num_hidden_layers"])
    }
    where |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(flags.model, device_map=where, offload_folder=folder, dtype="auto")
        ids = torch.tensor([json.loads(flags.prompt_ids)])
        drop_from_page_cache(flags.model)
        steps = _ColdSteps(flags.model)
        lengths = {"max_new_tokens": flags.tokens, "min_new_tokens": flags.tokens}
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, do_sample=False, logits_processor=[steps], **lengths)
    print(json.dumps({"seconds": steps.seconds, "token_ids": out[0, ids.shape[1] :].tolist()}))


if __name__ == "__main__":
    main()

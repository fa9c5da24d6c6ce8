"""How close the best two logits are at each greedy token, for the places where two systems part.

`python -m bench.compare.margins --model DIR --prompt JSON --tokens JSON` prints, for each token of
an answer, the distance of the best two logits of the resident model in float32.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompt", type=json.loads, required=True)
    parser.add_argument("--tokens", type=json.loads, required=True)
    flags = parser.parse_args()
    of_file = {"gguf_file": flags.model.name} if flags.model.is_file() else {}
    folder = flags.model.parent if of_file else flags.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **of_file)
    with torch.inference_mode():
        logits = model(torch.tensor([flags.prompt + flags.tokens])).logits[0]
    best = logits[len(flags.prompt) - 1 : -1].topk(2).values
    print(json.dumps({"margins": (best[:, 0] - best[:, 1]).tolist()}))


if __name__ == "__main__":
    main()

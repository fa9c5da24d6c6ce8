"""offload_rt on the same terms as the peers: a process of its own whose last line of output is JSON."""

import argparse
import json
import time

from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size


def main() -> None:
    """Generate greedily and print the seconds of each token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--budget", type=parse_size, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--prompt-ids", required=True)
    flags = parser.parse_args()
    seconds, token_ids = [], []
    with LLM(flags.model, device_memory=flags.budget, drafter="none") as llm:
        started = time.perf_counter()
        for piece in llm.stream(json.loads(flags.prompt_ids), SamplingParams(max_new_tokens=flags.tokens)):
            seconds.append(time.perf_counter() - started)
            token_ids += piece.token_ids
            started = time.perf_counter()
    print(json.dumps({"seconds": seconds, "token_ids": token_ids}))


if __name__ == "__main__":
    main()

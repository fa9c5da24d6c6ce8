"""One peer in a process of its own: loads, warms up, answers the prompts, and prints a line of
JSON.

python -m bench.compare.peers NAME --job JSON --prompts JSON --warm-up JSON --tokens N
"""

import argparse
import json
import resource
import sys
import time
from importlib.metadata import packages_distributions, version

import psutil

from bench.compare import contract

# Enough for caches, kernels and thread pools to be there, and for a draft to become known a little.
_WARM_UP_TOKENS = 4


def main() -> None:
    """Run one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--job", type=contract.Job.of, required=True)
    parser.add_argument("--prompts", type=json.loads, required=True, help="lists of token ids")
    parser.add_argument("--warm-up", type=json.loads, required=True, help="a list of token ids")
    parser.add_argument("--tokens", type=int, required=True)
    flags = parser.parse_args()
    system = contract.find(flags.name)
    started = time.perf_counter()
    peer = system.load(flags.job)
    load_s = time.perf_counter() - started
    peer.generate(flags.warm_up, _WARM_UP_TOKENS)
    answers = []
    read = []
    for prompt in flags.prompts:
        before = _storage_bytes()
        answers.append(peer.generate(prompt, flags.tokens))
        read.append(_storage_bytes() - before)
    distributions = packages_distributions()
    versions = {name: version(distributions[name][0]) for name in ("torch", *system.packages)}
    peer.close()
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    report = contract.Report(load_s, peer.supply, answers, read, _device_peak(), versions, children)
    print("\n" + report.text(), flush=True)


def _storage_bytes() -> int:
    """Bytes that this process and its children have fetched from storage."""
    me = psutil.Process()
    return sum(member.io_counters().read_bytes for member in (me, *me.children()))


def _device_peak() -> int:
    torch = sys.modules.get("torch")
    return torch.cuda.max_memory_allocated() if torch and torch.cuda.is_available() else 0


if __name__ == "__main__":
    main()

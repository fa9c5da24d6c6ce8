"""How long does `run` take beyond `import torch` to write one token of a GGUF file?

    python -m bench.models.start [--model FILE] [--rounds 5]

Whole processes in turn, with warm caches; the peer is `python -c "import torch"`.
"""

import subprocess
import sys
from functools import partial

from bench.common.checkpoints import REAL_FILE
from bench.common.measure import Benchmark, Spread, interleaved, timed


def main() -> None:
    """Print the seconds of both processes, and their difference."""
    benchmark = Benchmark("start", __doc__)
    benchmark.add("--model", default=str(REAL_FILE))
    benchmark.add("--rounds", type=int, default=5)
    flags = benchmark.start()
    run = ["-m", "offload_rt.run", flags.model, "Why is the sky blue?", "--chat", "--max-tokens=1"]
    started = {"torch": ["-c", "import torch"], "run": run}
    execute = partial(subprocess.run, check=True, capture_output=True)
    works = {
        name: partial(timed, partial(execute, [sys.executable, *words]))
        for name, words in started.items()
    }
    seconds = interleaved(works, flags.rounds)
    beyond = [run - torch for run, torch in zip(seconds["run"], seconds["torch"], strict=True)]
    results = {name: Spread.of(values) for name, values in {**seconds, "beyond": beyond}.items()}
    for name, spread in results.items():
        print(f"{name:<8}{spread} s")
    benchmark.finish(results=results)


if __name__ == "__main__":
    main()

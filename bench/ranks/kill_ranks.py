"""How do runs of two ranks end whose processes get signals at random moments?

    PYTHONPATH=.:tests python bench/ranks/kill_ranks.py [--times 50] [--seed 0]

Each run gets one signal, at a moment from the start of its processes to their end; as torchrun
does, the other rank is told to end 0.1 s after one has failed, in half of the runs. Prints each run
that does not end within 10 s, leaves something behind or says more than a sentence, and a tally.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from support.checkpoints import speaking_checkpoint
from support.programs import Program, started

LIMIT_S = 10.0
SIGNALS = [signal.SIGKILL] * 3 + [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def ending(said: str, codes: list[int | None], was_over: bool, has_left: bool, rank: int) -> str:
    """Name how a run ended, from its stderr and the exit codes of its ranks."""
    names = {
        "was over": was_over,
        "does not end": None in codes,
        "leaves files": has_left,
        "several sentences": said.count("\n") > 1,
        "ended well": codes == [0, 0],
        "names the rank": f"rank {rank} (" in said,
        "interrupted": said == "interrupted\n",
        "silent": not said,
    }
    return next((name for name, holds in names.items() if holds), "other")


def _end(ranks: list[Program], has_agent: bool, until: float) -> float:
    """Wait for all to end, for so long; returns the seconds it took."""
    started_s = time.monotonic()
    told = False
    while any(rank.process.exitcode is None for rank in ranks) and time.monotonic() < until:
        if has_agent and not told and any(rank.process.exitcode for rank in ranks):
            told = True
            time.sleep(0.1)
            for rank in ranks:
                rank.process.terminate()
        time.sleep(0.01)
    return time.monotonic() - started_s


def main() -> None:
    """Run pairs of ranks, send signals, and print how they end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pipeline", action="store_true")
    flags = parser.parse_args()
    chance = random.Random(flags.seed)
    tally = Counter[str]()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as name:
        model = speaking_checkpoint(Path(name) / "model")
        line = [
            *f"--model {model} --device cpu --prompt".split(), "the quick", "--quiet",
            "--max-tokens", "400",
        ]  # fmt: skip
        line += ["--pipeline", "2"] if flags.pipeline else []
        lasts_s = 0.0
        for i in range(-2, flags.times):
            number = chance.choice(SIGNALS)
            rank = chance.randrange(2)
            has_agent = chance.random() < 0.5
            moment = chance.random() * 1.1 * lasts_s
            folder = Path(name) / str(i)
            with started("offload_rt.run", line, folder, 2) as ranks:
                if i < 0:
                    lasts_s = _end(ranks, has_agent, time.monotonic() + 120)
                    continue
                time.sleep(moment)
                was_over = all(rank.process.exitcode is not None for rank in ranks)
                if not was_over:
                    ranks[rank].signal(number)
                seconds = _end(ranks, has_agent, time.monotonic() + LIMIT_S)
                codes = [rank.process.exitcode for rank in ranks]
                said = "".join(rank.err for rank in ranks)
                left = [
                    p.name
                    for p in (folder / "cache").rglob("*")
                    if p.is_file() and p.suffix != ".json"
                ]
                slowest = max(slowest, seconds)
                kind = ending(said, codes, was_over, bool(left), rank)
                tally[kind] += 1
                print(
                    f"{kind}: {number.name} to rank {rank} at {moment:.2f} of {lasts_s:.2f} s, "
                    f"agent {has_agent}, "
                    f"{seconds:.2f} s, exit codes {codes}: {said[-600:]!r}",
                    flush=True,
                )
    print(f"{dict(tally)}, slowest {slowest:.2f} s")


if __name__ == "__main__":
    sys.exit(main())

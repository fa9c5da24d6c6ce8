"""Is the working tree slower than another revision of this repository?

    python -m bench.compare.revision 516abd7 [--size 2100MB] [--rounds 3] [--only TEXT] [--avx2]

Check the revision out into a temporary directory. In every round each tree runs each case in a new
process: the expanded demo target, streamed in a quarter of its size or resident, without a drafter
or with the demo draft model. Each process generates every prompt once before the measurement. The
statistics of earlier runs are kept per tree, so both trees choose their tree sizes from
measurements. Runs without a drafter generate an eighth of the tokens. Ratios are seconds per token
of the working tree over those of the revision.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import AutoTokenizer

from bench.common.checkpoints import DRAFT, TARGET, expanded_model
from bench.common.measure import AVX2_ENVIRONMENT, ROOT, Benchmark, Spread, interleaved
from bench.common.prompts import held_out_prompts
from offload_rt.config import format_size, parse_size

# Both revisions have these names. The output is the seconds per token and per pass.
PROGRAM = """
import json, sys, time
from offload_rt import LLM, SamplingParams
model, draft, memory, temperature, n_new, prompts = json.loads(sys.argv[1])
drafting = {"draft_model": draft} if draft else {"drafter": "none"}

def run(llm, n):
    params = SamplingParams(max_new_tokens=n, temperature=temperature, seed=0)
    started = time.perf_counter()
    outputs = [llm.generate(prompt, params)[0] for prompt in prompts]
    passes = sum(output.stats.n_passes for output in outputs)
    tokens = sum(len(output.token_ids) for output in outputs)
    return time.perf_counter() - started, tokens, passes

with LLM(model, device_memory=memory, max_model_len=256, **drafting) as llm:
    run(llm, n_new)
    first, n_first, first_passes = run(llm, 1)
    seconds, tokens, passes = run(llm, n_new)
    seconds -= first
    print(json.dumps([seconds / (tokens - n_first), seconds / (passes - first_passes)]))
"""


@dataclass(frozen=True)
class Case:
    """A model in a budget, with a draft model or without, at a temperature."""

    memory: int
    draft: str | None
    temperature: float

    def __str__(self) -> str:
        drafting = "with trees" if self.draft else "plain"
        return f"{drafting} in {format_size(self.memory)}, T = {self.temperature}"


@dataclass(frozen=True)
class Tree:
    """A checked-out revision with a folder for its caches."""

    root: Path
    caches: Path

    def run(self, case: Case, model: Path, n_new: int, prompts: list[list[int]]) -> list[float]:
        """Return the seconds per token and per pass, measured in a new process."""
        n_new = n_new if case.draft else n_new // 8
        job = json.dumps([str(model), case.draft, case.memory, case.temperature, n_new, prompts])
        paths = {"PYTHONPATH": str(self.root), "XDG_CACHE_HOME": str(self.caches)}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, job],
            cwd=self.root, env={**os.environ, **paths}, check=True, stdout=subprocess.PIPE,
        )  # fmt: skip
        return json.loads(done.stdout.splitlines()[-1])


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Check a revision out into a new work tree below a folder."""
    root = folder / "revision"
    git = partial(subprocess.run, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    git(["git", "worktree", "add", "--quiet", "--detach", str(root), revision])
    try:
        yield root
    finally:
        git(["git", "worktree", "remove", "--force", str(root)])


def main() -> None:
    """Print a table and one JSON line."""
    bench = Benchmark("revision", __doc__)
    bench.add("revision")
    bench.add("--size", default="2100MB")
    bench.add("--rounds", type=int, default=3)
    bench.add("--prompts", type=int, default=3)
    bench.add("--new-tokens", type=int, default=32)
    bench.add("--only", default="", help="run the cases with this text in their names")
    bench.add("--avx2", action="store_true", help="restrict torch, MKL and oneDNN to AVX2")
    flags = bench.start()
    if flags.avx2:
        os.environ.update(AVX2_ENVIRONMENT)
    model = expanded_model(flags.size)
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
    size = parse_size(flags.size)
    cases = [
        Case(memory, draft, temperature)
        for memory in (size // 4, 2 * size)
        for draft, temperature in ((None, 0.0), (DRAFT, 0.0), (DRAFT, 0.6))
    ]
    cases = [case for case in cases if flags.only in str(case)]
    ratios = {}
    with TemporaryDirectory() as scratch, checked_out(flags.revision, Path(scratch)) as root:
        trees = {
            "working tree": Tree(ROOT, Path(scratch) / "caches"),
            flags.revision: Tree(root, Path(scratch) / "its-caches"),
        }
        for case in cases:
            works = {
                name: partial(tree.run, case, model, flags.new_tokens, prompts)
                for name, tree in trees.items()
            }
            measured = interleaved(works, flags.rounds)
            by_quantity = {
                name: list(zip(*rounds, strict=True)) for name, rounds in measured.items()
            }
            ours, theirs = by_quantity.values()
            ratios[str(case)] = [Spread.of_ratios(a, b) for a, b in zip(ours, theirs, strict=True)]
            per_token, per_pass = ratios[str(case)]
            seconds = " against ".join(f"{Spread.of(values[0])}" for values in (ours, theirs))
            print(
                f"{case}: {seconds} s per token, ratio {per_token}; per pass {per_pass}", flush=True
            )
    bench.finish(ratios=ratios)


if __name__ == "__main__":
    main()

"""How long does a token take in other systems: the same checkpoint, prompts and machine?

python -m scripts.compare [--size 2100MB] [--quantize FORMAT] [--rounds 4] [--tokens 48] [--chart docs/compare.png]

Every peer (a file of `bench/peers`) runs in a process of its own with the settings an expert would choose, and answers one
prompt a round. The order of the peers rotates from round to round, so that a slow disk or core is slow for all. Warming up is
not counted. Weights that come from the disk are cold in every pass. The floor of a figure is the bytes that a pass moves at the
best rate measured between the rounds. Greedy tokens are compared with those of the resident model. Systems that draft are
compared with systems that draft, plain ones with plain ones. With --quantize offload_rt runs the checkpoint in that format, and
the others the same weights as floats. The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from bench.compare import contract, outcome
from bench.compare.chart import caption, draw
from bench.compare.contract import Job
from bench.compare.outcome import Row, Run, run_peer
from bench.measure import (
    ROOT,
    Spread,
    commit,
    drop_from_page_cache,
    expanded_model,
    machine,
    quantized_model,
    run_json,
)  # fmt: skip
from bench.prompts import held_out_prompts
from offload_rt.config import format_size, parse_size
from offload_rt.errors import OffloadError, PromptError
from offload_rt.text.detokenize import load_tokenizer

_DRAFT, _BUILD = ROOT / "models/demo-draft", ROOT / "build"
_PROMPT_TOKENS, _LEAST_MAX_LEN = 64, 256
OURS = ("offload_rt_plain", "offload_rt_speculative")
# transformers loads a class when it is named.
IMPORTS = "import torch; from transformers import AutoTokenizer, LlamaForCausalLM; import offload_rt.llm"


@dataclass(frozen=True)
class Course:
    """What all peers are asked.

    prompts    one for each round; warm_up comes before each
    timeout_s  of one process
    """

    job: Job
    prompts: list[list[int]]
    warm_up: list[int]
    n_tokens: int
    timeout_s: float


@dataclass
class Results:
    """What was measured so far.

    gbps     rates by source of weights, one a round
    runs     by peer, one a round
    reasons  by peer, why it has no figures
    """

    gbps: dict[str, list[float]]
    runs: dict[str, list[Run]]
    reasons: dict[str, str]


def measure_floor(course: Course) -> tuple[dict[str, float], int]:
    """GB/s by source, and how many layers fit into the budget beside everything else."""
    drop_from_page_cache(course.job.plain)
    found = run_json(["-m", "bench.compare.floor", "--job", course.job.text()], course.timeout_s).result
    return found["gbps"], found["n_resident"]


def run_all(course: Course, peers: Sequence[str]) -> Results:
    """All rounds of all peers. A peer that fails is not run again and has a reason instead of figures."""
    reasons = {name: contract.refusal(contract.find(name)) for name in peers}
    found = Results({}, {name: [] for name in peers}, {name: why for name, why in reasons.items() if why})
    for i in range(len(course.prompts)):
        gbps, n_resident = measure_floor(course)
        course = replace(course, job=replace(course.job, n_resident=n_resident))
        for source, rate in gbps.items():
            found.gbps.setdefault(source, []).append(rate)
        for name in (*peers[i % len(peers) :], *peers[: i % len(peers)]):
            if name not in found.reasons:
                _take_turn(name, course, i, found)
    return found


def _take_turn(name: str, course: Course, i: int, found: Results) -> None:
    drop_from_page_cache(course.job.plain)
    try:
        run = run_peer(name, course.job, [course.prompts[i]], course.warm_up, course.n_tokens, course.timeout_s)
    except RuntimeError as error:
        found.reasons[name] = str(error)
        print(f"round {i + 1}  {name}: {error}", flush=True)
        return
    found.runs[name].append(run)
    print(f"round {i + 1}  {name}: {run.seconds_per_token:.4f} s per token", flush=True)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the peers' files, with an empty cache for offload_rt. Compiled extensions are kept."""
    _BUILD.mkdir(exist_ok=True)
    for lock in (_BUILD / "torch-extensions").glob("*/lock"):
        lock.unlink()  # left by a killed compilation; the next one would wait for it forever
    with tempfile.TemporaryDirectory(dir=_BUILD, prefix="compare-") as folder:
        changes = {"XDG_CACHE_HOME": folder, "TORCH_EXTENSIONS_DIR": str(_BUILD / "torch-extensions")}
        changes |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with mock.patch.dict(os.environ, changes):
            yield Path(folder)


def main() -> None:
    """Print the table and one JSON line, and draw the chart; where that cannot be, one sentence."""
    flags = _flags()
    try:
        _compare(flags)
    except subprocess.CalledProcessError as error:  # the script that expands the model has said why
        sys.exit(error.returncode)
    except (OffloadError, RuntimeError) as error:  # of a process its last line, which names the class
        sys.exit("error: " + str(error).rpartition("Error: ")[2].replace("--device-memory", "--budget"))


def _compare(flags: argparse.Namespace) -> None:
    model = (flags.model or expanded_model(flags.size)).resolve()
    nbytes = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    budget = flags.budget or nbytes // 4
    measured = commit()  # now, not at the end: the tree may change meanwhile
    about = f"{model.name}: {format_size(nbytes)} of weights, budget {format_size(budget)}; commit {measured}"
    print(f"{machine()}\n{about}; {flags.rounds} prompts, {flags.tokens} tokens each\n", flush=True)
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise PromptError(f"{model} has no tokenizer", need="one, for prompts are text", change="copy it there")
    prompts = held_out_prompts(tokenizer, flags.rounds + 1, _PROMPT_TOKENS)
    with scratch() as folder:
        max_len = max(_PROMPT_TOKENS + flags.tokens, _LEAST_MAX_LEN)
        ours, plain = quantized_model(model, flags.quantize, folder) if flags.quantize else (model, model)
        job = Job(ours, plain, flags.draft_model.resolve(), budget, 0, max_len, folder)
        found = run_all(Course(job, prompts[1:], prompts[0], flags.tokens, flags.timeout), flags.peers)
        imports = run_json(["-c", IMPORTS]).peak_rss
        reference = [run.token_ids for run in found.runs.get(outcome.REFERENCE, ())]
        rows = outcome.rows(flags.peers, found.runs, found.reasons, found.gbps)
        rows = outcome.with_margins(rows, plain, prompts[1:], reference)
    said = {"bench": "compare", "machine": machine(), "commit": measured, "model": ours.name, "model_bytes": nbytes}
    said |= {"budget_bytes": budget, "rounds": flags.rounds, "tokens": flags.tokens, "imports_bytes": imports}
    said |= {"gbps": found.gbps, "rows": [row.entry() for row in rows], "ratios": ratios(found)}
    _print(rows, found, imports)
    if flags.chart and any(row.reason is None for row in rows):
        draw(rows, caption(said), flags.chart)
    print(json.dumps(said))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; default: the demo target expanded to --size")
    parser.add_argument("--draft-model", type=Path, default=_DRAFT)
    parser.add_argument("--size", default="2100MB")
    parser.add_argument("--quantize", help="a format of scripts/quantize.py, such as pack-quantized")
    parser.add_argument("--budget", type=parse_size, help="default: a quarter of the weights")
    parser.add_argument("--rounds", type=int, default=4, help="prompts, each answered by every peer")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--peers", nargs="+", choices=contract.names(), default=contract.names())
    parser.add_argument("--timeout", type=float, default=400, help="seconds that one process may take")
    parser.add_argument("--chart", type=Path, help="file for a picture, PNG")
    return parser.parse_args()


def ratios(found: Results) -> dict[str, dict[str, list[float]]]:
    """How many times as fast each offload_rt is as each peer of its kind, round by round: the same prompt each time.

    Of its kind: that draft as well, or do not as well; and that finished all rounds.
    """
    n_rounds = max(map(len, found.runs.values()), default=0)
    speeds = {name: [1 / run.seconds_per_token for run in runs] for name, runs in found.runs.items()}
    kinds = {name: contract.find(name).DRAFTS for name, runs in found.runs.items() if len(runs) == n_rounds > 0}
    return {
        ours: {
            name: [mine / theirs for mine, theirs in zip(speeds[ours], speeds[name], strict=True)]
            for name, drafts in kinds.items()
            if drafts == kinds[ours] and name != ours
        }
        for ours in OURS
        if ours in kinds
    }


def _print(rows: Sequence[Row], found: Results, imports: int) -> None:
    rates = ", ".join(f"{source} {min(rates):.2f} to {max(rates):.2f} GB/s" for source, rates in found.gbps.items())
    print(f"\n{outcome.table(rows)}\n\nrates measured between the rounds: {rates}; a floor is at the best")
    print(f"peaks include the imports of torch and transformers, {format_size(imports)}, and file pages a peer maps")
    for ours, others in ratios(found).items():
        for name, values in others.items():
            print(f"{contract.find(ours).TITLE}: {Spread.of(values)} times as fast as {contract.find(name).TITLE}")


if __name__ == "__main__":
    main()

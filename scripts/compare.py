"""How long does a token take in other systems, on the same checkpoint, prompts and machine?

    python -m scripts.compare [--size 1600MB] [--budget 600MB] [--quantize FORMAT] [--rounds 4]
        [--tokens 48] [--chart docs/compare.png]
    python -m scripts.compare --gguf Q4_0 [--budget 6GB | --cgroup DIR] [--avx2]
        [--prompt-tokens 192] [--mixture qwen3_moe]

The model is SmolLM2-135M-Instruct, expanded without a change of its function. Every peer (a file of
`bench/compare/peers`) runs in a separate process with expert settings and answers one prompt a
round. The order of the peers rotates, so that a slow disk or core affects all.
Warm-up is not counted. Weights from the disk are cold in every pass. The floor is the bytes of a
pass at the best rate measured between the rounds. Greedy tokens are compared with the tokens of the
resident model. Drafting systems are compared with drafting systems. With --quantize offload_rt runs
the checkpoint in that format; its peers run the same weights as floats. The last line is one JSON
object.

The assistant of all peers is the model before its expansion. It computes the same function, so
nearly all of its tokens are accepted: an upper bound. offload_rt also runs with the draft head.

llama.cpp reads the weights as a GGUF file of type BF16, through node and the prebuilt package
node-llama-cpp. Its second row runs in a control group: the limit is the budget and the imports of
offload_rt, and the file is mapped. Control groups need root.

With --gguf all peers read one GGUF file, so only offload_rt and llama.cpp run. Plain offload_rt
gives the reference tokens. With --mixture the file is a random mixture and both decode plainly.
With --avx2 torch, MKL and oneDNN use AVX2 only, and llama.cpp does not run.

With --cgroup each process joins a control group. Its memory limit counts anonymous memory and
cached file pages. The budget of offload_rt is the limit less its imports; llama.cpp maps the file.
As root, with version 2 or 1 of the control groups:

    mkdir /sys/fs/cgroup/small; echo 1200M > /sys/fs/cgroup/small/memory.max
    mkdir /sys/fs/cgroup/memory/small
    echo 1200M > /sys/fs/cgroup/memory/small/memory.limit_in_bytes
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from bench.common.checkpoints import (
    REAL,
    REAL_HEAD,
    TARGET,
    drop_from_page_cache,
    expanded_model,
    gguf_model,
    mixture_file,
    quantized_model,
)
from bench.common.measure import AVX2_ENVIRONMENT, ROOT, Spread, commit, machine
from bench.common.processes import memory_group, run_json
from bench.common.prompts import chat_prompts, held_out_prompts
from bench.compare import contract, outcome
from bench.compare.chart import caption, draw
from bench.compare.contract import Job
from bench.compare.outcome import Row, Run, run_peer
from offload_rt.config import format_size, parse_size
from offload_rt.errors import OffloadError, PromptError
from offload_rt.text.detokenize import load_tokenizer

_BUILD = ROOT / "build"
_LEAST_MAX_LEN = 256
OURS = ("offload_rt_plain", "offload_rt_speculative")
PLAIN = (OURS[0], "llama_cpp")
READ_GGUF = (*OURS, "offload_rt_assisted", "llama_cpp", "llama_cpp_assisted")
# transformers loads a class when it is named.
IMPORTS = (
    "import torch; from transformers import AutoTokenizer, LlamaForCausalLM; import offload_rt.llm"
)


@dataclass(frozen=True)
class Course:
    """What all peers are asked.

    prompts    one for each round; warm_up comes before each
    timeout_s  of one process
    cgroup     control group for each process to join
    small      control group with a memory limit for the peers that need one, and its limit
    """

    job: Job
    prompts: list[list[int]]
    warm_up: list[int]
    n_tokens: int
    timeout_s: float
    cgroup: Path | None = None
    small: tuple[Path, int] | None = None


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
    measured = run_json(
        ["-m", "bench.compare.floor", "--job", course.job.text()], course.timeout_s
    ).result
    return measured["gbps"], measured["n_resident"]


def run_all(course: Course, peers: Sequence[str]) -> Results:
    """All rounds of all peers. A peer that fails is not run again and has a reason instead of
    figures.
    """
    reasons = {name: contract.find(name).refusal() for name in peers}
    results = Results(
        {}, {name: [] for name in peers}, {name: why for name, why in reasons.items() if why}
    )
    for i in range(len(course.prompts)):
        gbps, n_resident = measure_floor(course)
        course = replace(course, job=replace(course.job, n_resident=n_resident))
        for source, rate in gbps.items():
            results.gbps.setdefault(source, []).append(rate)
        for name in (*peers[i % len(peers) :], *peers[: i % len(peers)]):
            if name not in results.reasons:
                _take_turn(name, course, i, results)
    return results


def _take_turn(name: str, course: Course, i: int, results: Results) -> None:
    drop_from_page_cache(course.job.plain)
    job, cgroup = course.job, course.cgroup
    if course.small and contract.find(name).limited:
        cgroup, limit = course.small
        job = replace(job, limit=limit)
        # Pages that another process read are charged to its group.
        assert job.gguf is not None
        drop_from_page_cache(job.gguf)
    try:
        asked = ([course.prompts[i]], course.warm_up, course.n_tokens, course.timeout_s, cgroup)
        run = run_peer(name, job, *asked)
    except RuntimeError as error:
        results.reasons[name] = str(error)
        print(f"round {i + 1}  {name}: {error}", flush=True)
        return
    results.runs[name].append(run)
    decode = f"{run.seconds_per_token:.4f} s per token"
    print(f"round {i + 1}  {name}: {decode}, {run.prompt_s:.2f} s for the prompt", flush=True)


@contextmanager
def scratch(environment: Mapping[str, str]) -> Iterator[Path]:
    """A folder for the peers' files, with an empty cache for offload_rt. Compiled extensions are
    kept.

    environment  further variables of all processes
    """
    _BUILD.mkdir(exist_ok=True)
    for lock in (_BUILD / "torch-extensions").glob("*/lock"):
        lock.unlink()  # left by a killed compilation; the next one would wait for it forever
    with tempfile.TemporaryDirectory(dir=_BUILD, prefix="compare-") as folder:
        changes = {
            # Another version of ninja than that of the environment would compile again.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "XDG_CACHE_HOME": folder,
            "TORCH_EXTENSIONS_DIR": str(_BUILD / "torch-extensions"),
        }
        changes |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with mock.patch.dict(os.environ, changes | environment):
            yield Path(folder)


def main() -> None:
    """Print the table and one JSON line, and draw the chart; where that cannot be, one sentence."""
    flags = _flags()
    try:
        _compare(flags)
    except subprocess.CalledProcessError as error:  # the script that expands the model has said why
        sys.exit(error.returncode)
    # of a process its last line, which names the class
    except (OffloadError, RuntimeError) as error:
        sys.exit(
            "error: " + str(error).rpartition("Error: ")[2].replace("device_memory", "--budget")
        )


def _compare(flags: argparse.Namespace) -> None:
    source = flags.model or (
        Path(TARGET) if flags.mixture else expanded_model(flags.size, REAL, keep_width=True)
    )
    source = source.resolve()
    tokenizer = load_tokenizer(source)
    if tokenizer is None:
        raise PromptError(
            f"{source} has no tokenizer", need="one, for prompts are text", change="copy it there"
        )
    prompts_of = chat_prompts if tokenizer.chat_template else held_out_prompts
    length = [flags.prompt_tokens] if flags.prompt_tokens else []
    prompts = prompts_of(tokenizer, flags.rounds + 1, *length)
    longest = max(map(len, prompts))
    measured = commit()  # now, not at the end: the tree may change meanwhile
    with scratch(AVX2_ENVIRONMENT if flags.avx2 else {}) as folder:
        ours, plain = _checkpoints(flags, source, folder)
        nbytes = sum(
            path.stat().st_size
            for path in ([plain] if flags.gguf else source.glob("*.safetensors"))
        )
        imports = run_json(["-c", IMPORTS]).peak_rss
        limit = memory_limit(flags.cgroup) if flags.cgroup else None
        budget = flags.budget or (limit - imports if limit else parse_size("600MB"))
        said = {"bench": "compare", "machine": machine(), "commit": measured, "model": ours.name}
        said |= {
            "model_bytes": nbytes,
            "budget_bytes": budget,
            "rounds": flags.rounds,
            "tokens": flags.tokens,
        }
        said |= {"prompt_tokens": longest, "limit_bytes": limit, "avx2": flags.avx2}
        print(f"{_about(said)}\n", flush=True)
        max_len = max(longest + flags.tokens, _LEAST_MAX_LEN)
        readers = PLAIN if flags.mixture else READ_GGUF
        peers = flags.peers or (readers if flags.gguf else contract.names())
        needs_file = any(name.startswith("llama_cpp") for name in peers)
        job = Job(
            ours, plain, flags.draft_model.resolve(), budget, 0, max_len, folder, limit,
            flags.draft_head and flags.draft_head.resolve(),
            plain if flags.gguf else gguf_model(plain, "BF16", folder) if needs_file else None,
        )  # fmt: skip
        course = Course(job, prompts[1:], prompts[0], flags.tokens, flags.timeout, flags.cgroup)
        with memory_group(budget + imports) as small:
            results = run_all(replace(course, small=small), peers)
        first = OURS[0] if flags.gguf else outcome.REFERENCE
        reference = [run.token_ids for run in results.runs.get(first, ())]
        rows = outcome.rows(peers, results.runs, results.reasons, results.gbps, first)
        if not flags.mixture:  # as floats a mixture of 1 GB takes 7 GB
            rows = outcome.with_margins(rows, plain, prompts[1:], reference)
    said |= {"imports_bytes": imports, "gbps": results.gbps, "rows": [row.entry() for row in rows]}
    said |= {"ratios": ratios(results, decode_rate), "prompt_ratios": ratios(results, prompt_rate)}
    _print(rows, results, said)
    if flags.chart and any(row.reason is None for row in rows):
        draw(rows, caption(said), flags.chart)
    print(json.dumps(said))


def _checkpoints(flags: argparse.Namespace, source: Path, folder: Path) -> tuple[Path, Path]:
    """The checkpoint of offload_rt and that of its peers. The GGUF file of the demo target is
    kept.
    """
    if flags.mixture:
        path = mixture_file(flags.mixture, flags.gguf)
        return path, path
    if flags.gguf:
        path = gguf_model(source, flags.gguf, folder if flags.model else source.parent)
        return path, path
    return quantized_model(source, flags.quantize, folder) if flags.quantize else (source, source)


def _about(said: Mapping[str, Any]) -> str:
    """Two lines above everything: the machine, and the settings."""
    facts = [
        (
            f"{said['model']}: {format_size(said['model_bytes'])} of weights, budget"
            f" {format_size(said['budget_bytes'])}"
        ),
        f"commit {said['commit']}",
        (
            f"{said['rounds']} prompts of up to {said['prompt_tokens']} tokens, {said['tokens']}"
            " new tokens each"
        ),
    ]
    facts += [f"memory limit {format_size(said['limit_bytes'])}"] if said["limit_bytes"] else []
    facts += ["AVX2 only"] if said["avx2"] else []
    return f"{said['machine']}\n{'; '.join(facts)}"


def memory_limit(cgroup: Path) -> int:
    """Bytes that the processes of a control group may use, of version 2 or 1."""
    files = (cgroup / "memory.max", cgroup / "memory.limit_in_bytes")
    return int(next(path for path in files if path.exists()).read_text())


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help=f"a checkpoint; default: {REAL.name} expanded to --size"
    )
    parser.add_argument("--draft-model", type=Path, default=REAL, help="the assistant of all peers")
    parser.add_argument("--draft-head", type=Path, default=REAL_HEAD, help="of offload_rt")
    parser.add_argument("--size", default="1600MB")
    parser.add_argument(
        "--quantize", help="a format of scripts/quantize.py, such as pack-quantized"
    )
    parser.add_argument(
        "--gguf", help="matrix type of one GGUF file for all peers, such as BF16 or Q4_0"
    )
    parser.add_argument(
        "--mixture", choices=("qwen3_moe", "mixtral"), help="a random mixture, with --gguf"
    )
    parser.add_argument("--avx2", action="store_true", help="restrict all processes to AVX2")
    parser.add_argument(
        "--cgroup", type=Path, help="directory of a control group with a memory limit"
    )
    parser.add_argument(
        "--budget", type=parse_size, help="default: 600MB, or the limit less imports"
    )
    parser.add_argument(
        "--rounds", type=int, default=4, help="prompts, each answered by every peer"
    )
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument(
        "--prompt-tokens", type=int, help="length of all prompts; default: short questions"
    )
    parser.add_argument(
        "--peers", nargs="+", choices=contract.names(), help="default: all that read the files"
    )
    parser.add_argument(
        "--timeout", type=float, default=400, help="seconds that one process may take"
    )
    parser.add_argument("--chart", type=Path, help="file for a picture, PNG")
    return parser.parse_args()


def decode_rate(run: Run) -> float:
    """Tokens per second after the prompt."""
    return 1 / run.seconds_per_token


def prompt_rate(run: Run) -> float:
    """Prompts per second."""
    return 1 / run.prompt_s


def ratios(results: Results, rate: Callable[[Run], float]) -> dict[str, dict[str, list[float]]]:
    """Divide each offload_rt's rate by the rates of its peers, round by round: the same prompt each
    time.

    Peers of one kind: drafting or plain, with all rounds finished.
    """
    n_rounds = max(map(len, results.runs.values()), default=0)
    rates = {name: [rate(run) for run in runs] for name, runs in results.runs.items()}
    kinds = {
        name: contract.find(name).drafts
        for name, runs in results.runs.items()
        if len(runs) == n_rounds > 0
    }
    return {
        ours: {
            name: [mine / theirs for mine, theirs in zip(rates[ours], rates[name], strict=True)]
            for name, drafts in kinds.items()
            if drafts == kinds[ours] and name != ours
        }
        for ours in OURS
        if ours in kinds
    }


def _print(rows: Sequence[Row], results: Results, said: Mapping[str, Any]) -> None:
    rates = ", ".join(
        f"{source} {min(rates):.2f} to {max(rates):.2f} GB/s"
        for source, rates in results.gbps.items()
    )
    print(
        f"\n{outcome.table(rows)}\n\nrates measured between the rounds: {rates}; a floor is at the"
        " best"
    )
    imports = format_size(said["imports_bytes"])
    print(
        f"peaks include the imports of torch and transformers, {imports}, and file pages a peer"
        " maps"
    )
    for name, runs in results.runs.items():
        if runs and name not in results.reasons:
            decode = Spread.of([decode_rate(run) for run in runs])
            prompt = Spread.of([run.prompt_s for run in runs])
            print(f"{contract.find(name).title}: decode {decode} tokens/s, prompt {prompt} s")
    for what, rate in (("decode", decode_rate), ("prompt", prompt_rate)):
        for ours, others in ratios(results, rate).items():
            for name, values in others.items():
                titles = contract.find(ours).title, contract.find(name).title
                print(f"{what}: {titles[0]} {Spread.of(values)} times as fast as {titles[1]}")


if __name__ == "__main__":
    main()

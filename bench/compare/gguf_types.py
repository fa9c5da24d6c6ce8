"""How fast are llama.cpp and offload_rt on resident GGUF files of each type?

    python -m bench.compare.gguf_types [--types Q4_0 Q8_0] [--rounds 3] [--tokens 64]
        [--prompt-tokens 512] [--wide 300MB] [--activations int8] [--avx2]
        [--nats] [--questions FILE]

llama.cpp quantises the file of SmolLM2-135M-Instruct to each type. In every round each system
answers the same prompt, plainly and greedily, in a new process; the order alternates. Ratios are
offload_rt / llama.cpp, round by round. The last column is the number of equal first tokens.

SmolLM2's width of 576 is no multiple of 256, so llama.cpp replaces K types in many of its matrices.
--wide SIZE quantises an expanded demonstration model, whose widths are such multiples.
--questions FILE asks as many questions of each category of Spec-Bench as there are rounds, and lets
offload_rt draft. --avx2 restricts both systems to AVX2. --nats compares `--activations int8` with
exact products instead: changes of the log-probability of each token of the prompts.
"""

import os
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor

from bench.common.checkpoints import REAL_FILE, expanded_model
from bench.common.measure import AVX2_ENVIRONMENT, ROOT, Benchmark, Spread
from bench.common.processes import run_python
from bench.common.prompts import chat_prompts, held_out_prompts
from bench.compare.contract import Job
from bench.compare.outcome import Run, parting, run_peer
from bench.compare.quantizer import TYPES, quantized_file
from bench.speculate.spec_bench import questions_of
from offload_rt import LLM, SamplingParams
from offload_rt.config import parse_size
from offload_rt.text.detokenize import encode_chat, load_tokenizer

DEFAULT_TYPES = (
    "Q4_0", "Q4_1", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_M", "Q6_K", "Q8_0", "IQ3_S", "BF16",
)  # fmt: skip


def figures(theirs: list[Run], ours: list[Run], n_prompt: list[int]) -> dict[str, Spread]:
    """Return tokens/s of decoding and of the prompt, and their ratios round by round."""
    spreads = {}
    for kind, rate in (
        ("decode", lambda run, _: 1 / run.seconds_per_token),
        ("prompt", lambda run, n: n / run.prompt_s),
    ):
        rates = [list(map(rate, runs, n_prompt)) for runs in (theirs, ours)]
        spreads |= {
            f"{kind} llama.cpp": Spread.of(rates[0]),
            f"{kind} offload_rt": Spread.of(rates[1]),
            f"{kind} ratio": Spread.of_ratios(rates[1], rates[0]),
        }
    return spreads


def n_equal(theirs: list[Run], ours: list[Run]) -> int:
    """Count the tokens before the first difference of each pair of answers."""
    return sum(
        len(a.token_ids) if (at := parting(a.token_ids, b.token_ids)) is None else at
        for a, b in zip(theirs, ours, strict=True)
    )


def measure(
    path: Path, prompts: list[list[int]], warm_up: list[int], n_tokens: int, scratch: Path,
    ours: str = "offload_rt_plain", activations: str = "exact",
) -> list[list[Run]]:  # fmt: skip
    """Run llama.cpp and the peer `ours` on a file, a prompt per round."""
    max_len = max(map(len, prompts)) + n_tokens
    room = parse_size("6GB"), 0, max_len
    job = Job(path, path, path, *room, scratch, gguf=path, activations=activations)
    runs: dict[str, list[Run]] = {"llama_cpp": [], ours: []}
    for i, prompt in enumerate(prompts):
        for name in list(runs)[:: -1 if i % 2 else 1]:
            runs[name].append(run_peer(name, job, [prompt], warm_up, n_tokens))
    return list(runs.values())


def changes_in_nats(path: Path, prompts: list[list[int]]) -> Tensor:
    """Return log-probabilities with rounded activations less the exact ones, of all tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    values = []
    for activations in ("int8", "exact"):
        with LLM(str(path), activations=activations, drafter="none", dtype="float32") as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        entries = [
            chosen[token].logprob
            for output, prompt in zip(outputs, prompts, strict=True)
            for token, chosen in zip(prompt, output.prompt_logprobs or (), strict=True)
            if chosen is not None
        ]
        values.append(torch.tensor(entries))
    return values[0] - values[1]


def wide_file(size: str, folder: Path) -> Path:
    """Return a GGUF file in float16 whose widths are multiples of 256, written at first use."""
    out = folder / f"wide-{size}.gguf"
    if not out.exists():
        flags = ["--format", "gguf", "--type", "F16"]
        run_python("scripts/quantize.py", str(expanded_model(size)), str(out), *flags)
    return out


def main() -> None:
    """Print a line per type and the JSON line."""
    benchmark = Benchmark("gguf_types", __doc__)
    benchmark.add("--file", type=Path, default=REAL_FILE)
    benchmark.add("--types", nargs="+", choices=TYPES, default=DEFAULT_TYPES)
    benchmark.add("--rounds", type=int, default=3)
    benchmark.add("--tokens", type=int, default=64)
    benchmark.add("--prompt-tokens", type=int, default=512)
    benchmark.add("--wide", metavar="SIZE", help="of an expanded model in float16")
    benchmark.add("--questions", type=Path, metavar="FILE")
    benchmark.add("--skip", type=int, default=0, help="first question of each category")
    benchmark.add("--activations", choices=("exact", "int8"), default="exact")
    benchmark.add("--avx2", action="store_true")
    benchmark.add("--nats", action="store_true")
    flags = benchmark.start()
    if flags.avx2:
        os.environ.update(AVX2_ENVIRONMENT)
    folder = ROOT / "build/types"
    folder.mkdir(parents=True, exist_ok=True)
    file = wide_file(flags.wide, folder) if flags.wide else flags.file.resolve()
    prompts_of = held_out_prompts if flags.wide else chat_prompts
    tokenizer = load_tokenizer(file)
    warm_up, *prompts = prompts_of(tokenizer, flags.rounds + 1, flags.prompt_tokens)
    ours = "offload_rt_plain"
    if flags.questions:
        ours = "offload_rt_automatic"
        asked = questions_of(flags.questions, flags.rounds, flags.skip).values()
        turns = [{"role": "user", "content": text} for texts in asked for text in texts]
        options = {"add_generation_prompt": True}
        prompts = [encode_chat(tokenizer, [turn], options) for turn in turns]
    if flags.nats:
        print("\n| type | mean change in nats | mean size | largest |\n|---|---|---|---|")
        for type in (type for type in flags.types if type != "BF16"):
            changes = changes_in_nats(quantized_file(file, type, folder), prompts)
            figures_of = (changes.mean(), changes.abs().mean(), changes.abs().max())
            print(f"| {type} | {' | '.join(f'{x:.4f}' for x in figures_of)} |", flush=True)
        return
    results = {}
    columns: list[str] = []
    for type in flags.types:
        path = quantized_file(file, type, folder)
        pair = measure(path, prompts, warm_up, flags.tokens, folder, ours, flags.activations)
        results[type] = figures(*pair, [len(prompt) for prompt in prompts])
        if not columns:
            columns = list(results[type])
            print(f"\n| type | {' | '.join(columns)} | equal |\n|{'---|' * (len(columns) + 2)}")
        cells = [_cell(name, spread) for name, spread in results[type].items()]
        equal = f"{n_equal(*pair)} of {sum(len(run.token_ids) for run in pair[0])}"
        print(f"| {type} | {' | '.join(cells)} | {equal} |", flush=True)
    benchmark.finish(results=results)


def _cell(name: str, spread: Spread) -> str:
    digits = 2 if name.endswith("ratio") else 0
    least, middle, largest = (f"{value:.{digits}f}" for value in astuple(spread))
    return f"{middle} ({least} to {largest})"


if __name__ == "__main__":
    main()

"""How many more tokens does a pass accept after --learn-draft, and what does learning cost?

    python -m bench.speculate.learn [--tokens 2000] [--temperature 0.8] [--size 600MB] [--gbps 0.5]

Train the demo target for some minutes on C++, the headers of torch, unknown to its draft. The pair
represents a base draft with a fine-tuned target.

Part "count": tokens per pass while learning from answers to some headers ("meanwhile"), then
without learning on held-out headers: "after" (used to choose settings) and "unseen". Trees and
training slices per pass are fixed, so counts are independent of time.

Part "timed": an expanded target on a paced disk, with and without learning, interleaved: seconds
per token, prompt by prompt.
"""

import argparse
import random
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from unittest import mock

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from bench.common.checkpoints import DRAFT, TARGET, expanded_model, no_pair_stats
from bench.common.measure import ROOT, Benchmark, Spread
from bench.common.pacing import open_paced
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.llm import Stats
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import pick_drafter

TUNED = ROOT / "demo-cache" / "target-c++"
# Training windows and batches of the target; tokens of prompts and answers.
_WINDOW = 256
_BATCH = 4
_N_PROMPT = 48
_N_NEW = 96
_N_HELD_OUT = 12


def headers(tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[list[int]]]:
    """Return shuffled training texts and held-out prompts."""
    files = sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    texts = [tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids for path in files]
    random.Random(0).shuffle(texts)
    held_out = [text for text in texts[::4] if len(text) > 8 * _N_PROMPT]
    prompts = [text[i : i + _N_PROMPT] for text in held_out for i in (_N_PROMPT, len(text) // 2)]
    return [text for i, text in enumerate(texts) if i % 4], prompts


def tuned_target(texts: list[list[int]], minutes: float) -> Path:
    """Train the demo target on texts, at first use."""
    if TUNED.exists():
        return TUNED
    stream = torch.tensor([token for text in texts for token in text])
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    while (share := (time.perf_counter() - started) / (60 * minutes)) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - share)
        starts = torch.randint(len(stream) - _WINDOW, (_BATCH, 1), generator=generator)
        windows = stream[starts + torch.arange(_WINDOW)]
        loss = model(windows, labels=windows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the target on C++: {loss.item():.2f} nats in its last batch")
    model.to(torch.bfloat16).save_pretrained(TUNED)
    for path in Path(TARGET).glob("*token*"):
        shutil.copy(path, TUNED)
    return TUNED


def open_pair(target: Path, learn: str, memory: int, gbps: float = 0.0) -> LLM:
    """Open the target with the demo draft: fixed trees, or layers on a paced disk."""
    config = EngineConfig(
        str(target), DRAFT, device="cpu", dtype="auto" if gbps else "float32", device_memory=memory,
        max_model_len=256,
        tree_size=32, learn_draft=learn,
    )  # fmt: skip
    drafting = pick_drafter(config)
    open_type = drafting.type.open

    def open_drafter(parts: DraftParts) -> Drafter:
        cost = parts.cost if gbps else parts.cost.fixed(level_s=0.0)
        return open_type(replace(parts, cost=cost))

    drafting = replace(drafting, type=replace(drafting.type, open=open_drafter))
    return open_paced(config, gbps, drafting)


def answer(llm: LLM, prompt: list[int], temperature: float) -> Stats:
    """Return the statistics of an answer."""
    params = SamplingParams(max_new_tokens=_N_NEW, temperature=temperature, seed=0)
    return llm.generate(prompt, params)[0].stats


def count(
    target: Path, learn: str, prompts: list[list[int]], flags: argparse.Namespace
) -> dict[str, list[float]]:
    """Return tokens per pass on training prompts, then on held-out prompts without learning."""
    held_out = {"after": prompts[:_N_HELD_OUT], "unseen": prompts[-_N_HELD_OUT:]}
    others = prompts[_N_HELD_OUT:][: -(-flags.tokens // _N_NEW)]
    with open_pair(target, learn, 1 << 30) as llm:
        runner = llm.engine.runner
        work = runner.meanwhile
        n_times = flags.slices // runner.spec.n_layers

        def often() -> None:
            for _ in range(n_times):
                runner.streamer.meter.waited_s += 1e9
                work()

        def rates(prompts: Sequence[list[int]], meanwhile: Callable[[], None]) -> list[float]:
            with mock.patch.object(runner, "meanwhile", meanwhile):
                return [answer(llm, ids, flags.temperature).tokens_per_pass for ids in prompts]

        learned = {"meanwhile": rates(others, often)}
        return learned | {name: rates(part, lambda: None) for name, part in held_out.items()}


def timed(
    target: Path, prompts: list[list[int]], flags: argparse.Namespace
) -> dict[str, list[Stats]]:
    """Answer the same prompts with and without learning, interleaved."""
    results: dict[str, list[Stats]] = {"off": [], "on": []}
    with ExitStack() as stack:
        memory = parse_size(flags.size) // 3
        pairs = {
            learn: stack.enter_context(open_pair(target, learn, memory, flags.gbps))
            for learn in results
        }
        for llm in pairs.values():
            answer(llm, prompts[0][:8], flags.temperature)
        for i, prompt in enumerate(prompts):
            for learn in list(results)[:: -1 if i % 2 else 1]:
                results[learn].append(answer(pairs[learn], prompt, flags.temperature))
    return results


def main() -> None:
    """Print both parts."""
    bench = Benchmark("learn", __doc__)
    bench.add("--minutes", type=float, default=3.0, help="of training at first use; 0: untrained")
    bench.add("--temperature", type=float, default=0.0)
    bench.add("--tokens", type=int, default=2000)
    bench.add("--slices", type=int, default=6, help="training slices per pass of part count")
    bench.add("--size", default="600MB", help="of the expanded target")
    bench.add("--gbps", type=float, default=0.5, help="of its disk")
    bench.add("--prompts", type=int, default=4, help="of part timed")
    bench.add("--parts", nargs="+", default=["count", "timed"])
    flags = bench.start()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts, prompts = headers(tokenizer)
    target = tuned_target(texts, flags.minutes) if flags.minutes else Path(TARGET)
    result = {}
    with no_pair_stats():
        if "count" in flags.parts:
            counted = {learn: count(target, learn, prompts, flags) for learn in ("off", "on")}
            for part in ("meanwhile", "after", "unseen"):
                without, learned = (counted[learn][part] for learn in counted)
                ratios = [b / a for a, b in zip(without, learned, strict=True)]
                result[part] = fmean(learned) / fmean(without)
                means = f"{fmean(without):.2f}, learned {fmean(learned):.2f}"
                print(f"tokens per pass {part}: {means}; ratio {result[part]:.3f}")
                print(f"    {' '.join(f'{ratio:.2f}' for ratio in ratios)}")
            result |= {"count": counted}
        if "timed" in flags.parts:
            both = timed(expanded_model(flags.size, target), prompts[: flags.prompts], flags)
            pairs = list(zip(both["off"], both["on"], strict=True))
            of_token = [on.seconds_per_token / off.seconds_per_token for off, on in pairs]
            of_pass = [on.seconds / on.n_passes / (off.seconds / off.n_passes) for off, on in pairs]
            print("seconds per token, learning / not:", *(f"{ratio:.3f}" for ratio in of_token))
            print(f"seconds per pass, learning / not: {Spread.of(of_pass)}")
            waits = [[run.wait_seconds / run.seconds for run in runs] for runs in both.values()]
            shares = ", while learning ".join(f"{fmean(shares):.2f}" for shares in waits)
            print(f"share of time waited for the link: {shares}")
            result |= {"of_token": of_token, "of_pass": of_pass, "waits": waits}
    bench.finish(**result)


if __name__ == "__main__":
    main()

"""How many more tokens does a pass give once a draft has learned while weights stream, and what
does it cost meanwhile?

    python -m bench.learn [--tokens 2000] [--temperature 0.8] [--size 600MB] [--gbps 0.5]

The target is the demo pair's, trained on for some minutes on C++, torch's own headers, which its
draft has never seen: as a draft of a base model beside a fine-tuned target. Part "count": tokens
per pass while it learns from so many tokens of answers to some headers, and afterwards, without
learning, on others: on those that its settings were chosen by ("after") and on such that nothing
was chosen by ("unseen"); all against a draft that does not learn, with trees of one size, whatever
they cost, and so many slices of training in each pass, so that nothing hangs on the clock. Part
"timed": an expanded target over a paced disk, the same prompts with and without learning in turn,
nothing learned before: seconds per token, prompt by prompt. The last line is one JSON object.
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

from bench.measure import ROOT, Spread, commit, expanded_model, flag_parser, machine, print_result
from bench.methods import DRAFT, TARGET, no_pair_stats
from bench.paced import pace
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.llm import Stats
from offload_rt.speculate.protocols import Drafter, DraftParts
from offload_rt.speculate.select import pick_drafter

TUNED = ROOT / "demo-cache" / "target-c++"
# Tokens of a window and windows of a batch while the target is trained; tokens of a prompt, and of
# each answer.
_WINDOW = 256
_BATCH = 4
_N_PROMPT = 48
_N_NEW = 96
_N_HELD_OUT = 12


def headers(tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens of headers to train on, and prompts from others, in an order by chance."""
    files = sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    texts = [tokenizer(path.read_text(encoding="utf-8"), verbose=False).input_ids for path in files]
    random.Random(0).shuffle(texts)
    held_out = [one for one in texts[::4] if len(one) > 8 * _N_PROMPT]
    prompts = [one[at : at + _N_PROMPT] for one in held_out for at in (_N_PROMPT, len(one) // 2)]
    return [one for i, one in enumerate(texts) if i % 4], prompts


def tuned_target(texts: list[list[int]], minutes: float) -> Path:
    """The demo target, trained on for so long on these texts; made on first use."""
    if TUNED.exists():
        return TUNED
    stream = torch.tensor([token for one in texts for token in one])
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    generator = torch.Generator().manual_seed(0)
    while (share := (time.perf_counter() - started) / (60 * minutes)) < 1:
        optimizer.param_groups[0]["lr"] = 1e-3 * (1 - share)
        at = torch.randint(len(stream) - _WINDOW, (_BATCH, 1), generator=generator) + torch.arange(
            _WINDOW
        )
        loss = model(stream[at], labels=stream[at]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"the target on C++: {loss.item():.2f} nats in its last batch")
    model.to(torch.bfloat16).save_pretrained(TUNED)
    for path in Path(TARGET).glob("*token*"):
        shutil.copy(path, TUNED)
    return TUNED


def open_pair(target: Path, learn: str, memory: int, gbps: float = 0.0) -> LLM:
    """The target with the demo draft; trees of one size, unless its layers come from a disk of so
    many GB/s.
    """
    config = EngineConfig(
        str(target), DRAFT, device="cpu", dtype="auto" if gbps else "float32", device_memory=memory,
        max_model_len=256,
        tree_size=32, learn_draft=learn,
    )  # fmt: skip
    drafting = pick_drafter(config)

    def open_drafter(parts: DraftParts) -> Drafter:
        cost = parts.cost if gbps else parts.cost.fixed(level_s=0.0)
        return drafting.type.open(replace(parts, cost=cost))

    llm = LLM.open(config, replace(drafting, type=replace(drafting.type, open=open_drafter)))
    if gbps:
        pace(llm, gbps)
    llm.load()
    return llm


def answer(llm: LLM, prompt: list[int], temperature: float) -> Stats:
    """How an answer to a prompt was generated."""
    return llm.generate(
        prompt, SamplingParams(max_new_tokens=_N_NEW, temperature=temperature, seed=0)
    )[0].stats


def count(
    target: Path, learn: str, prompts: list[list[int]], flags: argparse.Namespace
) -> dict[str, list[float]]:
    """Tokens per pass on prompts that are learned from, if anything is, and then on held-out ones
    while nothing is.
    """
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
                return [
                    answer(llm, prompt, flags.temperature).tokens_per_pass for prompt in prompts
                ]

        found = {"meanwhile": rates(others, often)}
        return found | {name: rates(some, lambda: None) for name, some in held_out.items()}


def timed(
    target: Path, prompts: list[list[int]], flags: argparse.Namespace
) -> dict[str, list[Stats]]:
    """Answers to the same prompts in turn, with learning and without."""
    found: dict[str, list[Stats]] = {"off": [], "on": []}
    with ExitStack() as stack:
        memory = parse_size(flags.size) // 3
        pairs = {
            learn: stack.enter_context(open_pair(target, learn, memory, flags.gbps))
            for learn in found
        }
        for llm in pairs.values():
            answer(llm, prompts[0][:8], flags.temperature)
        for i, prompt in enumerate(prompts):
            for learn in list(found)[:: -1 if i % 2 else 1]:
                found[learn].append(answer(pairs[learn], prompt, flags.temperature))
    return found


def main() -> None:
    """Print both parts and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument(
        "--minutes",
        type=float,
        default=3.0,
        help="of training the target, the first time; 0: as it is",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument(
        "--slices", type=int, default=6, help="of training in each pass of part count"
    )
    parser.add_argument("--size", default="600MB", help="of the expanded target")
    parser.add_argument("--gbps", type=float, default=0.5, help="of its disk")
    parser.add_argument("--prompts", type=int, default=4, help="of part timed")
    parser.add_argument("--parts", nargs="+", default=["count", "timed"])
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}")
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
                print(
                    f"tokens per pass {part}: {fmean(without):.2f}, learned {fmean(learned):.2f};"
                    f" ratio {result[part]:.3f}"
                )
                print(f"    {' '.join(f'{one:.2f}' for one in ratios)}")
            result |= {"count": counted}
        if "timed" in flags.parts:
            both = timed(expanded_model(flags.size, target), prompts[: flags.prompts], flags)
            pairs = list(zip(both["off"], both["on"], strict=True))
            of_token = [on.seconds_per_token / off.seconds_per_token for off, on in pairs]
            of_pass = [on.seconds / on.n_passes / (off.seconds / off.n_passes) for off, on in pairs]
            print(
                f"seconds per token, learning / not: {' '.join(f'{one:.3f}' for one in of_token)}"
            )
            print(f"seconds per pass, learning / not: {Spread.of(of_pass)}")
            waits = [[one.wait_seconds / one.seconds for one in found] for found in both.values()]
            print(
                f"share of time waited for the link: {fmean(waits[0]):.2f}, while learning"
                f" {fmean(waits[1]):.2f}"
            )
            result |= {"of_token": of_token, "of_pass": of_pass, "waits": waits}
    print_result("learn", flags, **result)


if __name__ == "__main__":
    main()

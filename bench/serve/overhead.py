"""How much time does HTTP add to a pass of the engine?

    python -m bench.serve.overhead [--size 600MB] [--gbps 0.5] [--threads 1]

The expanded demo target with half its size as budget and a paced disk, or resident, answers each
prompt in turn by `LLM.generate` and by a stream of the server, a token per pass. The time of a pass
is the engine's: from the end of a pass to the end of the next, in the engine's thread. A pass is
compared with the same pass of the same text. A separate process reads the stream by a raw socket.
"""

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import mean, median
from unittest import mock

import torch

from bench.common.measure import Benchmark, Spread, interleaved
from bench.common.pacing import open_expanded
from bench.common.processes import Worker, worker
from bench.common.prompts import held_out_prompts
from bench.serve.serving import served
from offload_rt import LLM, SamplingParams


@contextmanager
def pass_ends(llm: LLM) -> Iterator[list[float]]:
    """Record `time.perf_counter` at the end of each pass, in the engine's thread."""
    step = llm.engine.step
    moments: list[float] = []

    def timed_step() -> object:
        events = step()
        moments.append(time.perf_counter())
        return events

    llm.engine.reset_prefix_cache()
    with mock.patch.object(llm.engine, "step", timed_step):
        yield moments


@dataclass(frozen=True)
class Run:
    """Text of an answer, ends of its passes, seconds from these to the arrivals of the chunks."""

    text: str
    ends: list[float]
    delays: list[float] = field(default_factory=list)


def generated(llm: LLM, prompt: list[int], n_new: int) -> Run:
    """Answer by `LLM.generate`."""
    params = SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)
    with pass_ends(llm) as ends:
        text = llm.generate([prompt], params)[0].text
    return Run(text, ends)


def streamed(llm: LLM, reader: Worker, url: str, prompt: list[int], n_new: int) -> Run:
    """Answer by a stream of the server."""
    body = {"prompt": prompt, "max_tokens": n_new, "temperature": 0, "ignore_eos": True}
    with pass_ends(llm) as ends:
        text, arrivals = reader.ask(url, body | {"stream": True})
    return Run(text, ends, [after - end for after, end in zip(arrivals, ends, strict=True)])


def compare(llm: LLM, prompts: list[list[int]], flags: argparse.Namespace) -> dict[str, object]:
    """Print and return seconds per pass of both ways, and the delays of chunks."""
    by_way: dict[str, list[float]] = {"http": [], "generate": []}
    all_delays: list[float] = []
    with served(llm) as server, worker("bench.serve.reader") as reader:
        for prompt in prompts:
            works = {
                "http": partial(streamed, llm, reader, server.url, prompt, flags.tokens),
                "generate": partial(generated, llm, prompt, flags.tokens),
            }
            results = interleaved(works, flags.rounds)
            texts = {result.text for answers in results.values() for result in answers}
            assert len(texts) == 1, "both ways produce the same text"
            for way, seconds in by_way.items():
                seconds.append(seconds_per_pass([result.ends for result in results[way]]))
            all_delays += [1e3 * delay for result in results["http"] for delay in result.delays]
    ratio = Spread.of_ratios(by_way["http"], by_way["generate"])
    plain = Spread.of(by_way["generate"])
    delay = Spread.of(all_delays)
    print(f"the engine's seconds per pass, HTTP / LLM.generate, interleaved: {ratio}")
    print(f"seconds per pass of LLM.generate: {plain}")
    print(f"ms from the end of a pass to the arrival of its chunk: {delay}")
    return {"ratio": ratio, "generate_s": plain, "delay_ms": delay}


def seconds_per_pass(rounds: list[list[float]]) -> float:
    """Average the passes of a text; each pass counts with its median over the rounds.

    rounds  ends of the passes in each round
    """
    passes = [[after - before for before, after in pairwise(ends)] for ends in rounds]
    return mean(median(seconds) for seconds in zip(*passes, strict=True))


def main() -> None:
    """Print the ratio of seconds per pass and the delays."""
    bench = Benchmark("serve.overhead", __doc__)
    bench.add("--size", default="600MB", help="of the expanded target")
    bench.add("--gbps", type=float, default=0.5, help="rate of its disk; 0: resident")
    n_cores = len(os.sched_getaffinity(0))
    bench.add("--threads", type=int, default=max(n_cores - 1, 1), help="of the engine's kernels")
    bench.add("--prompts", type=int, default=4)
    bench.add("--tokens", type=int, default=32, help="of each answer")
    bench.add("--rounds", type=int, default=5)
    flags = bench.start()
    torch.set_num_threads(flags.threads)
    with open_expanded(flags, drafter="none", max_model_len=128) as llm:
        assert llm.tokenizer is not None
        results = compare(llm, held_out_prompts(llm.tokenizer, flags.prompts), flags)
    bench.finish(**results)


if __name__ == "__main__":
    main()

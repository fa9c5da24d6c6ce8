"""What does a server give to several clients at once, and what does HTTP cost one of them?

    python -m bench.serve [--size 600MB] [--gbps 0.5] [--clients 4 8 16] [--rate 1]

The demo target, expanded to --size, is served with half of that as its budget, its disk paced to --gbps. The same held-out
prompts are sent over the loopback, round by round: one by one, from so many clients at once, and at random moments, --rate a
second on average. Throughput is tokens of all answers over the seconds from the first request to the last token. Then one
client asks in turn by HTTP and by `LLM.stream`. Answers are greedy; those of one prompt are compared. The last line is one JSON
object.
"""

import argparse
import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from socket import create_server
from statistics import median

import uvicorn
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.learn import PacedDisk
from bench.measure import Spread, commit, expanded_model, machine
from bench.methods import TARGET
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.server.app import ServerLimits, make_app


@dataclass(frozen=True)
class Asked:
    """One answer: seconds to its first token and to its last, its tokens, the passes that brought them, and its text."""

    first_s: float
    seconds: float
    n_tokens: int
    n_passes: int
    text: str


@dataclass(frozen=True)
class Round:
    """Answers to all prompts, and the seconds from the first request to the last token."""

    seconds: float
    answers: list[Asked]

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        return sum(one.n_tokens for one in self.answers) / self.seconds


async def ask(client: AsyncOpenAI, prompt: list[int], n_new: int, after_s: float = 0.0) -> Asked:
    """Stream an answer."""
    await asyncio.sleep(after_s)
    started, first, text, n_passes = time.perf_counter(), 0.0, "", 0
    extra = {"ignore_eos": True}
    stream = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=n_new, temperature=0, stream=True, extra_body=extra
    )
    async for chunk in stream:
        first = first or time.perf_counter()
        text, n_passes = text + chunk.choices[0].text, n_passes + 1
    return Asked(first - started, time.perf_counter() - started, n_new, n_passes, text)


async def send(url: str, prompts: Sequence[list[int]], n_new: int, n_clients: int, moments: Sequence[float]) -> Round:
    """Send all prompts, at these moments, with so many under way at once at most."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        room = asyncio.Semaphore(n_clients)

        async def one(prompt: list[int], after_s: float) -> Asked:
            async with room:
                return await ask(client, prompt, n_new, after_s)

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(*each) for each in zip(prompts, moments, strict=True)))
        return Round(time.perf_counter() - started, list(answers))


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The address of a server of this model, in a thread."""
    app = make_app(llm, "demo", ServerLimits(1 << 20, 4, 256, 3600))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        server.should_exit = True
        thread.join()


def through_http(llm: LLM, url: str, prompts: Sequence[list[int]], n_new: int) -> list[float]:
    """Seconds per pass after the first of a lone client by HTTP over those of `LLM.stream`, prompt by prompt in turn."""
    params, ratios = SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True), []
    for i, prompt in enumerate(prompts):
        found = {}
        for way in ("http", "stream") if i % 2 else ("stream", "http"):
            llm.engine.reset_prefix_cache()
            if way == "http":
                (one,) = asyncio.run(send(url, [prompt], n_new, 1, [0.0])).answers
                found[way] = (one.seconds - one.first_s) / (one.n_passes - 1)
            else:
                moments = [time.perf_counter() for _ in llm.stream(prompt, params)]
                found[way] = (moments[-1] - moments[0]) / (len(moments) - 1)
        ratios.append(found["http"] / found["stream"])
    return ratios


def main() -> None:
    """Print a table, what HTTP costs, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="600MB", help="of the expanded target")
    parser.add_argument("--gbps", type=float, default=0.5, help="of its disk")
    parser.add_argument("--drafter", default="recycle", help="also none; draft models are not used")
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, of those at random moments")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args()
    print(f"{machine()}; commit {commit()}")
    prompts = held_out_prompts(AutoTokenizer.from_pretrained(TARGET), flags.prompts)
    config = EngineConfig(
        str(expanded_model(flags.size)), drafter=flags.drafter, device_memory=parse_size(flags.size) // 2,
        max_model_len=128, max_num_seqs=max(flags.clients), device="cpu",
    )  # fmt: skip
    at_once = [0.0] * len(prompts)
    draw = random.Random(0)
    arrivals = list(accumulate((draw.expovariate(flags.rate) for _ in prompts[1:]), initial=0.0))
    ways = {"one by one": (1, at_once), **{f"{n} clients": (n, at_once) for n in flags.clients}}
    ways[f"{flags.rate} a second"] = (len(prompts), arrivals)
    rounds: dict[str, list[Round]] = {name: [] for name in ways}
    with LLM.open(config) as llm:
        llm.engine_plan = replace(llm.engine_plan, disk=PacedDisk(llm.engine_plan.disk, flags.gbps))
        llm.load()
        with served(llm) as url:
            asyncio.run(send(url, prompts[:1], 4, 1, [0.0]))
            for _ in range(flags.rounds):
                for name, (n_clients, moments) in ways.items():
                    llm.engine.reset_prefix_cache()
                    rounds[name].append(asyncio.run(send(url, prompts, flags.tokens, n_clients, moments)))
            ratios = through_http(llm, url, prompts[:4], flags.tokens)
    table = Table("sent", "tokens/s", "against one by one", "first token s", "s per token after it", "same texts")
    alone = rounds["one by one"]
    for name, found in rounds.items():
        answers = [one for each in found for one in each.answers]
        gain = [each.tokens_per_second / one.tokens_per_second for each, one in zip(found, alone, strict=True)]
        first = Spread.of([one.first_s for one in answers])
        per_token = median((one.seconds - one.first_s) / (one.n_tokens - 1) for one in answers)
        texts = [one.text for one in alone[0].answers]
        n_same = sum(one.text == text for each in found for one, text in zip(each.answers, texts, strict=True))
        rate = median(each.tokens_per_second for each in found)
        row = f"{rate:.2f}", str(Spread.of(gain)), str(first), f"{per_token:.3f}", f"{n_same} of {len(answers)}"
        table.add_row(name, *row)
    Console(width=160).print(table)
    print(f"seconds per pass, by HTTP / by LLM.stream, prompts in turn: {Spread.of(ratios)}")
    result = {"bench": "serve", "machine": machine(), "commit": commit(), **vars(flags), "http": ratios}
    print(json.dumps(result | {"rounds": {name: [asdict(one) for one in found] for name, found in rounds.items()}}))


if __name__ == "__main__":
    main()

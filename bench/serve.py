"""What does a server give to several clients at once, and what does HTTP cost one of them?

    python -m bench.serve [--size 600MB] [--gbps 0.5] [--clients 1 4 16] python -m bench.serve
    --peer      # beside `transformers serve`, whose extra dependencies it needs

The demo target, expanded to --size, is served with half of that as its budget, its disk paced to
--gbps. A client in a process of its own sends the same held-out prompts over the loopback, round by
round: one by one, and at random moments, n times as often on average as one by one they would be
answered, with at most n under way. Throughput is tokens of all answers over the seconds from the
first request to the last token; an answer's first token is timed from the moment it was meant to be
asked for. Then one client asks in turn by HTTP and by `LLM.stream`. With --peer the demo target
itself, resident, is served by `offload-rt serve` and by `transformers serve`, each in a process of
its own, and both are asked in turn. Answers are greedy; those of one prompt are compared. The last
line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from socket import create_connection, create_server
from statistics import median
from typing import Any

import uvicorn
from openai import AsyncOpenAI
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.measure import (
    ROOT,
    Spread,
    commit,
    expanded_model,
    family,
    flag_parser,
    machine,
    print_result,
)
from bench.methods import TARGET
from bench.paced import pace
from bench.prompts import held_out_prompts
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig, parse_size
from offload_rt.server.app import make_app
from offload_rt.server.service import ServerLimits


@dataclass(frozen=True)
class Server:
    """Where a server is, how it calls its model, and what it is told beside what OpenAI's clients
    say.
    """

    url: str
    model: str = "demo"
    extra: bool = True


@dataclass(frozen=True)
class Asked:
    """One answer: seconds from its moment to its first and its last token, its tokens, the chunks
    they came in, its text.
    """

    first_s: float
    seconds: float
    n_tokens: int
    n_chunks: int
    text: str

    @property
    def per_token_s(self) -> float:
        """Of those after the first."""
        return (self.seconds - self.first_s) / (self.n_tokens - 1)


@dataclass(frozen=True)
class Round:
    """Answers to all prompts, and the seconds from the first request to the last token."""

    seconds: float
    answers: list[Asked]

    @property
    def tokens_per_second(self) -> float:
        """Of all answers together."""
        return sum(one.n_tokens for one in self.answers) / self.seconds


async def send(
    server: Server, prompts: Sequence[Any], n_new: int, n_clients: int, moments: Sequence[float]
) -> Round:
    """Send all prompts, at these moments, with so many under way at once at most."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        room = asyncio.Semaphore(n_clients)
        started = time.perf_counter()

        async def one(prompt: Any, after_s: float) -> Asked:
            await asyncio.sleep(started + after_s - time.perf_counter())
            async with room:
                meant = time.perf_counter() if n_clients == 1 else started + after_s
                first = 0.0
                text = ""
                n_chunks = 0
                extra = {"ignore_eos": True} if server.extra else None
                stream = await client.completions.create(
                    model=server.model,
                    prompt=prompt,
                    max_tokens=n_new,
                    temperature=0,
                    stream=True,
                    extra_body=extra,
                )
                async for chunk in stream:
                    for choice in chunk.choices:
                        first = first or time.perf_counter()
                        text = text + choice.text
                        n_chunks = n_chunks + 1
            return Asked(first - meant, time.perf_counter() - meant, n_new, n_chunks, text)

        answers = await asyncio.gather(*(one(*each) for each in zip(prompts, moments, strict=True)))
        return Round(time.perf_counter() - started, list(answers))


def be_client() -> None:
    """Do what comes line by line on stdin, and print what came of it."""
    for line in sys.stdin:
        server, *others = json.loads(line)
        print(json.dumps(asdict(asyncio.run(send(Server(**server), *others)))), flush=True)


@dataclass(frozen=True)
class Client:
    """A process that sends; see `send`."""

    process: subprocess.Popen

    def send(
        self,
        server: Server,
        prompts: Sequence[Any],
        n_new: int,
        n_clients: int = 1,
        moments: Sequence[float] = (),
    ) -> Round:
        """All at once, if there are no moments."""
        print(
            json.dumps(
                [asdict(server), prompts, n_new, n_clients, moments or [0.0] * len(prompts)]
            ),
            file=self.process.stdin,
            flush=True,
        )
        found = json.loads(self.process.stdout.readline())
        return Round(found["seconds"], [Asked(**one) for one in found["answers"]])


@contextmanager
def served(llm: LLM) -> Iterator[Server]:
    """A server of this model, in a thread."""
    app = make_app(llm, "demo", ServerLimits(1 << 20, 4, 256, 3600))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    with create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        yield Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
        server.should_exit = True
        thread.join()


@contextmanager
def started(*command: str) -> Iterator[str]:
    """The address of a server that is a process of its own, once it listens."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    whole = [str(Path(sys.executable).with_name(command[0])), *command[1:], "--port", str(port)]
    with family(
        subprocess.Popen(whole, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ) as process:
        while process.poll() is None:
            try:
                create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"


def through_http(
    client: Client, llm: LLM, server: Server, prompts: Sequence[list[int]], n_new: int
) -> list[float]:
    """Seconds per pass after the first of a lone client by HTTP over those of `LLM.stream`, prompt
    by prompt in turn.
    """
    params = SamplingParams(max_tokens=n_new, temperature=0, ignore_eos=True)
    ratios = []
    for i, prompt in enumerate(prompts):
        found = {}
        for way in ("http", "stream") if i % 2 else ("stream", "http"):
            llm.engine.reset_prefix_cache()
            if way == "http":
                answer = client.send(server, [prompt], n_new).answers[0]
                # a chunk is a pass
                found[way] = answer.seconds - answer.first_s, answer.n_chunks - 1
            else:
                moments = [time.perf_counter() for _ in llm.stream(prompt, params)]
                found[way] = moments[-1] - moments[0], len(moments) - 1
        if all(n for _, n in found.values()):  # not of what the first pass has answered
            http, stream = (seconds / n for seconds, n in (found["http"], found["stream"]))
            ratios.append(http / stream)
    return ratios


def of_clients(
    client: Client, prompts: list[list[int]], flags: argparse.Namespace
) -> tuple[dict[str, list[Round]], list[float]]:
    """Rounds by how the prompts were sent, and what `through_http` gives."""
    config = EngineConfig(
        str(expanded_model(flags.size)), drafter=flags.drafter,
        device_memory=parse_size(flags.size) // 2,
        max_model_len=128, max_num_seqs=max(flags.clients), device="cpu",
    )  # fmt: skip
    rounds: dict[str, list[Round]] = {}
    with LLM.open(config) as llm:
        pace(llm, flags.gbps)
        llm.load()
        with served(llm) as server:
            client.send(server, prompts, flags.tokens, len(prompts))  # drafters learn
            for _ in range(flags.rounds):
                llm.engine.reset_prefix_cache()
                alone = client.send(server, prompts, flags.tokens)
                rounds.setdefault("one by one", []).append(alone)
                for n in flags.clients:
                    draw = random.Random(0)
                    rate = n * len(prompts) / alone.seconds
                    moments = list(
                        accumulate((draw.expovariate(rate) for _ in prompts[1:]), initial=0.0)
                    )
                    llm.engine.reset_prefix_cache()
                    rounds.setdefault(f"{n} clients", []).append(
                        client.send(server, prompts, flags.tokens, n, moments)
                    )
            return rounds, through_http(client, llm, server, prompts[:4], flags.tokens)


def of_peer(client: Client, texts: list[str], flags: argparse.Namespace) -> dict[str, list[Round]]:
    """Rounds of this package's server and of transformers', by one client and by all."""
    rounds: dict[str, list[Round]] = {}
    ours = [
        "offload-rt",
        "serve",
        "--model",
        TARGET,
        "--device",
        "cpu",
        "--max-num-seqs",
        str(max(flags.clients)),
    ]
    ours += ["--served-model-name", TARGET, "--drafter", flags.drafter, "--dtype", "float32"]
    theirs = [
        "transformers",
        "serve",
        TARGET,
        "--device",
        "cpu",
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
    ]
    # no prompt comes twice
    parts = [texts[at : at + flags.prompts] for at in range(0, len(texts), flags.prompts)]
    with started(*ours) as mine, started(*theirs) as other:
        servers = {
            "transformers": Server(other, TARGET, extra=False),
            "offload-rt": Server(mine, TARGET),
        }
        for server in servers.values():
            client.send(server, parts[0], flags.tokens)
        for part, n in zip(parts[1:], flags.clients * flags.rounds, strict=True):
            for name, server in servers.items():
                rounds.setdefault(f"{name}, {n}", []).append(
                    client.send(server, part, flags.tokens, n)
                )
    return rounds


def table(rounds: dict[str, list[Round]], base: str) -> Table:
    """A row for each way, with its throughput and texts against those of the way that `base`
    begins, in the same round.
    """
    shown = Table(
        "sent", "tokens/s", f"against {base}", "first token s", "s per token after it", "same texts"
    )
    for name, found in rounds.items():
        others = rounds.get(f"{base}, {name.split(', ')[-1]}") or rounds[base]
        pairs = [
            (one, other)
            for each, by in zip(found, others, strict=True)
            for one, other in zip(each.answers, by.answers, strict=True)
        ]
        gain = [
            each.tokens_per_second / other.tokens_per_second
            for each, other in zip(found, others, strict=True)
        ]
        rate = median(each.tokens_per_second for each in found)
        per_token = median(one.per_token_s for one, _ in pairs)
        first = Spread.of([one.first_s for one, _ in pairs])
        n_same = sum(one.text == other.text for one, other in pairs)
        row = (
            f"{rate:.2f}",
            str(Spread.of(gain)),
            str(first),
            f"{per_token:.4f}",
            f"{n_same} of {len(pairs)}",
        )
        shown.add_row(name, *row)
    return shown


def main() -> None:
    """Print a table, what HTTP costs, and one JSON line."""
    parser = flag_parser(__doc__)
    parser.add_argument("--size", default="600MB", help="of the expanded target")
    parser.add_argument("--gbps", type=float, default=0.5, help="of its disk")
    parser.add_argument("--drafter", default="recycle", help="also none; draft models are not used")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--peer", action="store_true", help="compare with `transformers serve` instead"
    )
    parser.add_argument("--as-client", action="store_true", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.as_client:
        return be_client()
    print(f"{machine()}; commit {commit()}")
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    prompts = held_out_prompts(
        tokenizer, flags.prompts * (1 + flags.peer * flags.rounds * len(flags.clients))
    )
    result: dict[str, object] = {}
    command = [sys.executable, "-m", "bench.serve", "--as-client"]
    with ExitStack() as ends:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        client = Client(ends.enter_context(family(subprocess.Popen(command, cwd=ROOT, **pipes))))
        if flags.peer:
            rounds = of_peer(client, [tokenizer.decode(one) for one in prompts], flags)
            Console(width=160).print(table(rounds, "transformers"))
        else:
            rounds, result["http"] = of_clients(client, prompts, flags)
            Console(width=160).print(table(rounds, "one by one"))
            print(
                "seconds per pass, by HTTP / by LLM.stream, prompts in turn:"
                f" {Spread.of(result['http'])}"
            )
    result["rounds"] = {name: [asdict(one) for one in found] for name, found in rounds.items()}
    print_result("serve", flags, **result)


if __name__ == "__main__":
    main()

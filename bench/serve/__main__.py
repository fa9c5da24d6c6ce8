"""How much throughput does the server gain with several clients?

    python -m bench.serve [--size 600MB] [--gbps 0.5] [--clients 1 4 16]
    python -m bench.serve --peer
    python -m bench.serve --load 120

Serve the expanded demo target with half its size as budget and a paced disk. A client process
sends held-out prompts sequentially, then at random moments, n times as often, with at most n
concurrent requests. Throughput counts all tokens from the first request to the last token. The time
to the first token starts at the intended request. `python -m bench.serve.overhead` measures the
cost of HTTP.

With --peer, `offload-rt serve` and `transformers serve` (with its extra dependencies) serve the
resident demo target in turn. Greedy answers to equal prompts are compared.

With --load, clients send plain requests, grammars and tool calls for these seconds to the resident
demo target. They disconnect from 30 % of the streams. Answers are compared with sequential answers.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate
from statistics import median

from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from bench.common.checkpoints import TARGET
from bench.common.measure import Benchmark, Spread
from bench.common.pacing import open_expanded
from bench.common.prompts import held_out_prompts
from bench.serve.client import Client, Round, Server, client_process
from bench.serve.load import Counts, load
from bench.serve.serving import served, started
from offload_rt import LLM


def rounds_of_clients(
    client: Client, prompts: list[list[int]], flags: argparse.Namespace
) -> dict[str, list[Round]]:
    """Return rounds by number of clients."""
    limits = {"max_model_len": 128, "max_num_seqs": max(flags.clients)}
    rounds: dict[str, list[Round]] = {}
    with open_expanded(flags, drafter=flags.drafter, **limits) as llm, served(llm) as server:
        client.send(server, prompts, flags.tokens, len(prompts))  # drafters learn
        for _ in range(flags.rounds):
            llm.engine.reset_prefix_cache()
            alone = client.send(server, prompts, flags.tokens)
            rounds.setdefault("sequential", []).append(alone)
            for n in flags.clients:
                draw = random.Random(0)
                rate = n * len(prompts) / alone.seconds
                gaps = (draw.expovariate(rate) for _ in prompts[1:])
                moments = list(accumulate(gaps, initial=0.0))
                llm.engine.reset_prefix_cache()
                answers = client.send(server, prompts, flags.tokens, n, moments)
                rounds.setdefault(f"{n} clients", []).append(answers)
    return rounds


def rounds_of_peer(
    client: Client, texts: list[str], flags: argparse.Namespace
) -> dict[str, list[Round]]:
    """Return rounds of both servers, by number of clients. No prompt is repeated."""
    rounds: dict[str, list[Round]] = {}
    shared = ["--device", "cpu", "--dtype", "float32"]
    ours = ["offload-rt", "serve", "--model", TARGET, "--served-model-name", TARGET, *shared]
    ours += ["--max-num-seqs", str(max(flags.clients)), "--drafter", flags.drafter]
    theirs = ["transformers", "serve", TARGET, "--host", "127.0.0.1", *shared]
    parts = [texts[i : i + flags.prompts] for i in range(0, len(texts), flags.prompts)]
    with started(*ours) as our_url, started(*theirs) as their_url:
        servers = {
            "transformers": Server(their_url, TARGET, extra=False),
            "offload-rt": Server(our_url, TARGET),
        }
        for server in servers.values():
            client.send(server, parts[0], flags.tokens)
        for part, n in zip(parts[1:], flags.clients * flags.rounds, strict=True):
            for name, server in servers.items():
                answers = client.send(server, part, flags.tokens, n)
                rounds.setdefault(f"{name}, {n}", []).append(answers)
    return rounds


def counts_of_load(texts: Sequence[str], flags: argparse.Namespace) -> Counts:
    """Return the counts of a load on the resident demo target."""
    drafter = flags.drafter
    slots = max(flags.clients)
    with LLM(TARGET, device="cpu", drafter=drafter, max_model_len=256, max_num_seqs=slots) as llm:
        assert llm.tokenizer is not None
        template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{% endif %}"
        llm.tokenizer.chat_template = template
        with served(llm) as server:
            return load(server.url, texts, slots, flags.load)


def table(rounds: dict[str, list[Round]], base: str) -> Table:
    """Show throughput, relative to the base in the same round, latencies and equal texts."""
    shown = Table(
        "requests", "tokens/s", f"/ {base}", "first token s", "s per later token", "equal texts"
    )
    for name, ours in rounds.items():
        others = rounds.get(f"{base}, {name.split(', ')[-1]}") or rounds[base]
        answers = [answer for round in ours for answer in round.answers]
        base_answers = [answer for round in others for answer in round.answers]
        rates = [round.tokens_per_second for round in ours]
        n_equal = sum(a.text == b.text for a, b in zip(answers, base_answers, strict=True))
        shown.add_row(
            name,
            f"{median(rates):.2f}",
            str(Spread.of_ratios(rates, [round.tokens_per_second for round in others])),
            str(Spread.of([answer.first_s for answer in answers])),
            f"{median(answer.per_token_s for answer in answers):.4f}",
            f"{n_equal} of {len(answers)}",
        )
    return shown


def main() -> None:
    """Print a table."""
    bench = Benchmark("serve", __doc__)
    bench.add("--size", default="600MB", help="of the expanded target")
    bench.add("--gbps", type=float, default=0.5, help="rate of its disk")
    bench.add("--drafter", default="recycle", help="a drafter without a draft model, or none")
    bench.add("--clients", type=int, nargs="+", default=[1, 4, 16])
    bench.add("--prompts", type=int, default=16)
    bench.add("--tokens", type=int, default=32, help="of each answer")
    bench.add("--rounds", type=int, default=2)
    bench.add("--peer", action="store_true", help="compare with `transformers serve`")
    bench.add("--load", type=float, help="seconds of mixed requests")
    flags = bench.start()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    n_parts = 1 + flags.peer * flags.rounds * len(flags.clients)
    prompts = held_out_prompts(tokenizer, flags.prompts * n_parts)
    if flags.load:
        counts = counts_of_load([tokenizer.decode(ids) for ids in prompts], flags)
        print(counts)
        return bench.finish(load=asdict(counts))
    console = Console(width=160)
    with client_process() as client:
        if flags.peer:
            rounds = rounds_of_peer(client, [tokenizer.decode(ids) for ids in prompts], flags)
            console.print(table(rounds, "transformers"))
            return bench.finish(rounds=rounds)
        rounds = rounds_of_clients(client, prompts, flags)
    console.print(table(rounds, "sequential"))
    bench.finish(rounds=rounds)


if __name__ == "__main__":
    main()

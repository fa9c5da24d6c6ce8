"""OpenAI client process that sends prompts and times the answers."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from openai import AsyncOpenAI

from bench.common.processes import Worker, answer_jobs, worker


@dataclass(frozen=True)
class Server:
    """Address and model name; `extra` for servers that accept vLLM's fields."""

    url: str
    model: str = "demo"
    extra: bool = True


@dataclass(frozen=True)
class Answer:
    """Seconds to the first and last token since the intended request time, tokens, chunks, text."""

    first_s: float
    seconds: float
    n_tokens: int
    n_chunks: int
    text: str

    @property
    def per_token_s(self) -> float:
        """Seconds per token after the first."""
        return (self.seconds - self.first_s) / (self.n_tokens - 1)


@dataclass(frozen=True)
class Round:
    """Answers to all prompts, and the seconds from the first request to the last token."""

    seconds: float
    answers: list[Answer]

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all answers."""
        return sum(answer.n_tokens for answer in self.answers) / self.seconds


async def send(
    server: Server, prompts: Sequence[Any], n_new: int, n_clients: int, moments: Sequence[float]
) -> Round:
    """Send prompts at these moments, with at most `n_clients` concurrent requests."""
    extra = {"ignore_eos": True} if server.extra else None
    options = {"max_tokens": n_new, "temperature": 0, "stream": True, "extra_body": extra}
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        room = asyncio.Semaphore(n_clients)
        started = time.perf_counter()

        async def request(prompt: Any, after_s: float) -> Answer:
            await asyncio.sleep(started + after_s - time.perf_counter())
            async with room:
                intended = time.perf_counter() if n_clients == 1 else started + after_s
                first = 0.0
                chunks = []
                stream = await client.completions.create(
                    model=server.model, prompt=prompt, **options
                )
                async for chunk in stream:
                    first = first or time.perf_counter()
                    chunks += [choice.text for choice in chunk.choices]
            end = time.perf_counter()
            return Answer(first - intended, end - intended, n_new, len(chunks), "".join(chunks))

        pairs = zip(prompts, moments, strict=True)
        answers = await asyncio.gather(*(request(*pair) for pair in pairs))
        return Round(time.perf_counter() - started, list(answers))


@dataclass(frozen=True)
class Client:
    """A process that executes `send`."""

    worker: Worker

    def send(
        self, server: Server, prompts: Sequence[Any], n_new: int, n_clients: int = 1,
        moments: Sequence[float] = (),
    ) -> Round:  # fmt: skip
        """Send prompts; without moments all at once."""
        moments = moments or [0.0] * len(prompts)
        answer = self.worker.ask(asdict(server), prompts, n_new, n_clients, moments)
        return Round(answer["seconds"], [Answer(**fields) for fields in answer["answers"]])


@contextmanager
def client_process() -> Iterator[Client]:
    """Start a client process."""
    with worker("bench.serve.client") as process:
        yield Client(process)


if __name__ == "__main__":
    answer_jobs(lambda server, *job: asdict(asyncio.run(send(Server(**server), *job))))

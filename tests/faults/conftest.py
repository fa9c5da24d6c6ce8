"""What every test of faults shares: a model that talks without end, the process that forks runs, and the count."""

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from checkpoints import speaking_checkpoint
from test_command_line import PROMPT, SMALL

from faults.counting import Count
from faults.process import Ended, Job, Zygote
from offload_rt import LLM, SamplingParams
from offload_rt.errors import CapacityError

COUNT = pytest.StashKey[Count]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[COUNT] = Count()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line at the end of the session."""
    if config.stash[COUNT].tried:
        terminalreporter.write_line(str(config.stash[COUNT]))


@pytest.fixture(scope="session", autouse=True)
def _heed_signals() -> Iterator[None]:
    """Also in the background of a shell, where what is started ignores them."""
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
    kept = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, kept, strict=True):
        if handler == signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    yield
    for number, handler in zip(numbers, kept, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def faults(request: pytest.FixtureRequest) -> Count:
    return request.config.stash[COUNT]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="session")
def begins_with(model: Path) -> str:
    """How the endless answer begins."""
    with LLM(str(model), device="cpu", max_model_len=256) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=200))[0].text


@pytest.fixture(scope="session")
def speaks(model: Path) -> Callable[..., list[str]]:
    """The arguments of a run that says no more than its text."""
    return lambda *more, model=model: ["--model", str(model), *SMALL, "--prompt", PROMPT, "--quiet", *more]


@pytest.fixture(scope="session")
def endless(model: Path) -> list[str]:
    """The arguments of a run that goes on until it is stopped, with as little memory as will do."""
    flags = ["--model", str(model), "--prompt", PROMPT, "--quiet", "--device", "cpu", "--max-model-len", "8192"]
    with pytest.raises(CapacityError) as least:
        LLM(str(model), device="cpu", max_model_len=8192, device_memory=1)
    budget = re.search(r"set --device-memory to (\d+)", str(least.value)).group(1)
    return [*flags, "--max-new-tokens", "8000", "--device-memory", budget]


@pytest.fixture(scope="session")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of a run with a draft model."""
    draft = speaking_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=2)
    flags = {
        "model": model,
        "draft-model": draft,
        "tree-size": 8,
        "tree-depth": 3,
        "max-model-len": 128,
        "device": "cpu",
    }
    return [part for name, value in flags.items() for part in (f"--{name}", str(value))]


@pytest.fixture(scope="session")
def zygote(speaks: Callable[..., list[str]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    zygote = Zygote(speaks("--max-new-tokens", "2"), tmp_path_factory.mktemp("rehearsal"))
    yield zygote
    zygote.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """Gives an empty folder each time."""
    names = iter(range(10**6))

    def make() -> Path:
        path = tmp_path / f"job-{next(names)}"
        path.mkdir()
        return path

    yield make


@pytest.fixture
def run_all(zygote: Zygote) -> Callable[[Sequence[Job]], list[Ended]]:
    """Run jobs to their end, two at a time."""

    def run(jobs: Sequence[Job]) -> list[Ended]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda job: zygote.start(job).end(), jobs))

    return run

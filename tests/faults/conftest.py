"""Fixtures for tests of faults: a model without end token, and the command line in this process."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import speaking_checkpoint
from support.command_line import PROMPT, SMALL, Speaks
from support.processes import handled

from offload_rt import LLM, SamplingParams


@pytest.fixture(autouse=True)
def _heed_interrupts() -> Iterator[None]:
    """Restore SIGINT, which background shells ignore for their processes."""
    with handled(signal.SIGINT, signal.default_int_handler):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("speaking"))


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return speaking_checkpoint(tmp_path_factory.mktemp("draft"), num_hidden_layers=2)


@pytest.fixture(scope="session")
def begins_with(model: Path) -> str:
    with LLM(str(model), device="cpu", max_model_len=256) as llm:
        return llm.generate(PROMPT, SamplingParams(max_new_tokens=200))[0].text


@pytest.fixture(scope="session")
def speaks(model: Path) -> Speaks:
    """Arguments of a run that prints only its text."""
    return lambda *more, model=model: [
        "--model", str(model), *SMALL, "--prompt", PROMPT, "--quiet", *more,
    ]  # fmt: skip

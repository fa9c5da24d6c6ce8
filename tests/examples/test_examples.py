"""Each example runs offline and prints the results that it announces."""

import os
import runpy
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.programs import started, wait_until

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "async_requests": "The capital of France is", "chat": "assistant: ",
    "compare_transformers": "equal to transformers: True", "generate": "passes over the weights",
    "images": "the answer depends on the image: True", "logprobs": "perplexity of the prompt",
    "openai_client": "\n", "plan": "predicted", "sample": "repeatable: True",
    "speculate": "identical: True", "stream": "\n",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.glob("*.py")} - {"demo"}))
def test_example_prints_its_result(name, monkeypatch, capfd, tmp_path):
    popen = subprocess.Popen

    @contextmanager
    def served(command: list[str]) -> Iterator[SimpleNamespace]:
        cache = os.environ["XDG_CACHE_HOME"]  # has the times of earlier examples
        with started(command[2], command[3:], tmp_path, XDG_CACHE_HOME=cache) as (program,):
            wait_until(lambda: "for clients" in program.err)
            lines = program.err.splitlines()
            yield SimpleNamespace(stderr=lines, terminate=program.process.terminate)

    def opened(command: list[str], **more: Any) -> Any:
        return served(command) if "offload_rt.serve" in command else popen(command, **more)

    monkeypatch.setattr(subprocess, "Popen", opened)
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert PRINTED[name] in capfd.readouterr().out
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text(encoding="utf-8")

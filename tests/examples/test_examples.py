"""Each example runs offline and prints the results that it announces."""

import os
import runpy
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

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


def test_every_example_has_an_expected_output():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"demo"} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_its_result(name, monkeypatch, capfd, tmp_path):
    popen = subprocess.Popen

    @contextmanager
    def served(command: list[str]) -> Iterator[SimpleNamespace]:
        cache = os.environ["XDG_CACHE_HOME"]  # has the times of earlier examples
        with started(command[2], command[3:], tmp_path, XDG_CACHE_HOME=cache) as (program,):
            wait_until(lambda: "for clients" in program.err)
            yield SimpleNamespace(
                stderr=program.err.splitlines(), terminate=program.process.terminate
            )

    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: (
            served(command) if "offload_rt.serve" in command else popen(command, **more)
        ),
    )
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert PRINTED[name] in capfd.readouterr().out
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"`{name}.py`" in readme

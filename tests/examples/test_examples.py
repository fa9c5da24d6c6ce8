"""Each example runs offline and prints the results that it announces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "async_requests": "class Queue",
    "chat": "assistant: ",
    "compare_transformers": "equal to transformers: True",
    "generate": "24 tokens",
    "logprobs": "perplexity of the prompt",
    "openai_client": "\n",
    "plan": "predicted",
    "sample": "repeatable: True",
    "speculate": "identical: True",
    "stream": "\n",
}


def test_every_example_has_an_expected_output():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"demo"} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example_prints_its_result(name):
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert PRINTED[name] in result.stdout
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert f"`{name}.py`" in readme

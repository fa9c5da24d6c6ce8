"""Each example runs offline and prints the results that it announces."""

import runpy
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"
PRINTED = {
    "async_requests": "The capital of France is", "chat": "assistant: ",
    "compare_transformers": "equal to transformers: True", "generate": "passes over the weights",
    "images": "the answer depends on the image: True", "logprobs": "perplexity of the prompt",
    "plan": "predicted", "sample": "repeatable: True", "speculate": "identical: True",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({path.stem for path in FOLDER.glob("*.py")} - {"demo"}))
def test_example_prints_its_result(name, monkeypatch, capfd):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER.parent))
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert PRINTED.get(name, "\n") in capfd.readouterr().out
    assert f"`{name}.py`" in (FOLDER / "README.md").read_text(encoding="utf-8")

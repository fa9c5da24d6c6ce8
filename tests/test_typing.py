"""The package is typed for its users: mypy accepts correct programs and rejects wrong ones."""

import os
import subprocess
import sys
from pathlib import Path

import offload_rt

PROGRAM = """
from offload_rt import LLM, Output, SamplingParams

def run(llm: LLM) -> list[str]:
    outputs: list[Output] = llm.generate(["a", "b"], SamplingParams(max_tokens=3))
    outputs += llm.generate([1, 2])
    texts = [output.text for output in outputs]
    return texts + [piece.text for piece in llm.stream("a")]
"""
WRONG = """
from offload_rt import LLM, SamplingParams

def run(llm: LLM) -> int:
    SamplingParams(temperature="warm")
    return llm.generate("a")[0].text
"""


def test_mypy_checks_programs_that_use_the_package(tmp_path):
    root = Path(offload_rt.__file__).parents[1]
    assert (root / "offload_rt" / "py.typed").exists()
    for name, program in (("right.py", PROGRAM), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(root / ".mypy_cache")]
    command += ["--config-file", str(root / "pyproject.toml"), "right.py", "wrong.py"]
    # mypy does not see editable installs.
    environment = os.environ | {"MYPYPATH": str(root)}
    errors = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "right.py" not in errors.stdout
    assert 'incompatible type "str"' in errors.stdout
    assert 'got "str", expected "int"' in errors.stdout

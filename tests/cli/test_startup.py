"""Imports before the work starts: neither torch nor transformers for a plan or a flag error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import llama_config, llama_tensors, write_checkpoint

from offload_rt.models.families import FAMILIES
from offload_rt.planning.known_models import KNOWN

LARGE = ("torch", "transformers", "numba", "huggingface_hub")
# Runs a command line, and prints its exit code and the large libraries it has loaded.
PROGRAM = """
import json, sys
from offload_rt.cli.main import main
for arguments in json.loads(sys.argv[1]):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code or 0
    loaded = sorted({*json.loads(sys.argv[2])} & {*sys.modules})
    print(json.dumps([code, loaded]), file=sys.stderr)
"""
SIZES = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}  # fmt: skip
MORE = {
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 2.0},
              "quantization_config": {"quant_method": "fp8"}},
    "mimo": {"num_nextn_predict_layers": 1},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
}  # fmt: skip


def outcomes(commands: list[list[str]]) -> list[list[Any]]:
    """Exit code and large libraries after each command, all in one process."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(LARGE)]
    done = subprocess.run(program, capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("[")]
    assert len(lines) == len(commands), done.stderr
    return [json.loads(line) for line in lines]


def plan(model: str | Path, *more: str) -> list[str]:
    return ["plan", "--model", str(model), "--gpu", "rtx4090", *more]


@pytest.mark.slow
def test_plan_imports_neither_torch_nor_transformers(tmp_path):
    """From a config.json, its directory, files with weights, and a shape."""
    commands = []
    for name, family in FAMILIES.items():
        config = {"model_type": name, "architectures": [family.architecture], **SIZES}
        path = tmp_path / name / "config.json"
        path.parent.mkdir()
        path.write_text(json.dumps(config | MORE.get(name, {})))
        commands.append(plan(path.parent, "--json") if name in MORE else plan(path))
    config = llama_config(max_position_embeddings=512)
    weights = write_checkpoint(tmp_path / "weights", config, llama_tensors(config))
    shapes = {raw["model_type"]: name for name, raw in KNOWN.items()}
    commands += [
        *(plan(name) for kind, name in shapes.items() if kind in FAMILIES),
        plan(weights), plan(weights, "--draft-model", str(weights)),
        plan("llama2-70b", "--draft-model", "llama2-7b", "--sweep", "memory"),
        plan("llama2-70b", "--drafter", "self", "--gpu", "h100"),
        plan("llama2-7b", "--kv-memory", "1GiB", "--kv-dtype", "fp8", "--link-format", "lossless"),
        plan("llama3-8b", "--pipeline", "2"),
    ]  # fmt: skip
    for command, outcome in zip(commands, outcomes(commands), strict=True):
        assert outcome == [0, []], command


def test_help_and_flag_errors_import_no_large_library(tmp_path):
    more = {"run": ["--prompt", "x"], "calibrate": ["--draft-model", str(tmp_path)]}
    commands = [["--help"]]
    for verb in ("run", "chat", "serve", "plan", "convert", "calibrate"):
        wrong = ["--model", str(tmp_path / "nothing"), *more.get(verb, [])]
        commands += [[verb, "--help"], [verb, "--model", "m", "--frobnicate"], [verb, *wrong]]
    for command, outcome in zip(commands, outcomes(commands), strict=True):
        assert outcome == [0 if "--help" in command else 2, []], command

"""A checkpoint changes during a run: the run ends after its text so far, or continues unharmed."""

import json
import os
import shutil
from pathlib import Path

import pytest
from support.checkpoints import llama_tensors, write_file
from support.command_line import PROMPT

from offload_rt import LLM, SamplingParams
from offload_rt.errors import LinkError
from offload_rt.offload.disk import DiskTier
from offload_rt.weights.checkpoint import open_checkpoint

WEIGHTS = "model.safetensors"


def _overwrite(path: Path, value: float | None) -> None:
    """Write other weights into the same file: of another seed, or all of one value."""
    tensors = llama_tensors(json.loads((path.parent / "config.json").read_text()), seed=1)
    if value is not None:
        tensors = {name: tensor.fill_(value) for name, tensor in tensors.items()}
    other = path.with_name("other")
    write_file(other, tensors)
    with path.open("r+b") as file:
        file.write(other.read_bytes())
    other.unlink()


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    _overwrite(path.with_name("new"), None)
    path.with_name("new").replace(path)


ENDS = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "lengthened": lambda path: os.truncate(path, path.stat().st_size + 1),
    "overwritten": lambda path: _overwrite(path, None),
    "overwritten by no numbers": lambda path: _overwrite(path, float("nan")),
}
GOES_ON = {
    "deleted": Path.unlink,
    "replaced": _replace,
    "the folder deleted": lambda path: shutil.rmtree(path.parent),
    "its mode changed": lambda path: path.chmod(0),
}


@pytest.mark.parametrize("name", [*ENDS, *GOES_ON])
def test_checkpoint_changed_during_a_run(name, model, begins_with, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    text = ""
    with LLM(str(copy), device="cpu", max_model_len=128, device_memory=1_000_000) as llm:
        assert llm.plan.tiers.count("disk") > 3
        pieces = llm.stream(PROMPT, SamplingParams(max_new_tokens=60))
        text += next(pieces).text + next(pieces).text
        {**ENDS, **GOES_ON}[name](copy / WEIGHTS)
        if name in ENDS:
            with pytest.raises(LinkError, match=WEIGHTS):
                for piece in pieces:
                    text += piece.text
        else:
            text += "".join(piece.text for piece in pieces)
            assert len(text) >= 60
    assert text and begins_with.startswith(text)


@pytest.mark.parametrize("name", ["overwritten", "replaced"])
def test_file_changed_between_header_and_weights(name, model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    checkpoint = open_checkpoint(copy)
    {**ENDS, **GOES_ON}[name](copy / WEIGHTS)
    with pytest.raises(LinkError, match="changed while in use"):
        DiskTier(checkpoint.layers)

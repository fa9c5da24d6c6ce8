"""A checkpoint that fails or changes while it is read: the run ends after what it had produced, or goes on unharmed."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from checkpoints import llama_tensors, write_file
from test_command_line import PROMPT

from faults.counting import Count
from faults.injected import Failure
from faults.process import Ended, Job, Zygote, judge
from offload_rt.errors import LinkError
from offload_rt.offload.disk import DiskTier
from offload_rt.weights.checkpoint import open_checkpoint

Speaks = Callable[..., list[str]]
Folder = Callable[[], Path]

N_TOKENS = 120
WEIGHTS = "model.safetensors"


def _overwrite(path: Path, value: float | None) -> None:
    """Write other weights into the same file: of another seed, or all of one value."""
    tensors = llama_tensors(json.loads((path.parent / "config.json").read_text()), seed=1)
    if value is not None:
        tensors = {name: tensor.fill_(value) for name, tensor in tensors.items()}
    write_file(path.with_name("other"), tensors)
    raw = path.with_name("other").read_bytes()
    path.with_name("other").unlink()
    with path.open("r+b") as file:
        file.write(raw)


def _replace(path: Path) -> None:
    shutil.copy(path, path.with_name("new"))
    _overwrite(path.with_name("new"), None)
    path.with_name("new").replace(path)


ENDS = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "lengthened": lambda path: os.truncate(path, path.stat().st_size + 1),
    "overwritten": lambda path: _overwrite(path, None),
    "overwritten by no numbers": lambda path: _overwrite(path, float("nan")),
}
GOES_ON = {
    "deleted": Path.unlink,
    "replaced": _replace,
    "moved": lambda path: path.rename(path.with_name("moved.safetensors")),
    "the folder deleted": lambda path: shutil.rmtree(path.parent),
    "its mode changed": lambda path: path.chmod(0),
    "config deleted": lambda path: path.with_name("config.json").unlink(),
    "tokenizer emptied": lambda path: path.with_name("tokenizer.json").write_text(""),
}


def _changed(change: Callable[[Path], None], arguments: list[str], copy: Path, zygote: Zygote, folder: Path) -> Ended:
    running = zygote.start(Job([*arguments, "--model", str(copy)], folder))
    running.wait_for(lambda: len(running.said()) > 20)
    change(copy / WEIGHTS)
    return running.end()


@pytest.mark.parametrize("name", [*ENDS, *GOES_ON])
def test_a_checkpoint_that_changes_while_it_is_used(
    name: str, model: Path, endless: list[str], begins_with: str, zygote: Zygote, tmp_path: Path, folder: Folder,
    faults: Count,
) -> None:  # fmt: skip
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    with faults.one():
        if name in ENDS:
            ended = _changed(ENDS[name], endless, copy, zygote, folder())
            judge(ended, [3], WEIGHTS)
        else:
            some = ["--max-new-tokens", str(N_TOKENS), "--max-model-len", "8192"]
            ended = _changed(GOES_ON[name], [*endless, *some], copy, zygote, folder())
            judge(ended, [0])
        text = ended.out.removesuffix("\n")
        n = min(len(text), len(begins_with))
        assert n >= 20 and text[:n] == begins_with[:n]


@pytest.mark.parametrize("change", [lambda path: _overwrite(path, None), _replace], ids=["overwritten", "replaced"])
def test_a_file_that_changes_between_its_header_and_its_weights(
    change: Callable[[Path], None], model: Path, tmp_path: Path, faults: Count
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    checkpoint = open_checkpoint(copy)
    change(copy / WEIGHTS)
    with faults.one(), pytest.raises(LinkError, match="changed while in use"):
        DiskTier(checkpoint.layers)


def test_reads_that_fail_in_mid_pass(
    speaks: Speaks, begins_with: str, folder: Folder, run_all: Callable[[Sequence[Job]], list[Ended]], faults: Count
) -> None:
    chance = random.Random(0)
    errors = (errno.EIO, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EINTR)
    jobs = []
    for n, error in enumerate(errors * 4):
        more = [["--json"], [], ["--trace", "t.json"]][n % 3]
        failure = Failure("preadv", error, after=chance.choice((0, 1, 5, chance.randrange(400))))
        jobs.append(Job(speaks("--max-new-tokens", "40", *more), folder(), failures=[failure]))
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0, 3])
            if "--json" in ended.job.arguments:
                told = json.loads(ended.out or '{"text": ""}')
                assert begins_with.startswith(told["text"])
            else:
                assert begins_with.startswith(ended.out.removesuffix("\n"))


@pytest.mark.parametrize("call", ["fstat", "stat", "open"])
def test_other_calls_that_fail(
    call: str, speaks: Speaks, folder: Folder, run_all: Callable[[Sequence[Job]], list[Ended]], faults: Count
) -> None:
    arguments = speaks("--max-new-tokens", "4")
    within = WEIGHTS if call == "stat" else ""
    jobs = [Job(arguments, folder(), failures=[Failure(call, errno.EIO, after, within)]) for after in (0, 1, 3, 30)]
    for ended in run_all(jobs):
        with faults.one():
            judge(ended, [0, 2, 3])


def test_a_model_given_as_its_own_prompt_file(speaks: Speaks, model: Path, zygote: Zygote, folder: Folder) -> None:
    arguments = [one for one in speaks() if one not in ("--prompt", PROMPT)]
    judge(zygote.start(Job([*arguments, "--prompt-file", str(model / WEIGHTS)], folder())).end(), [2], "not UTF-8")
    judge(zygote.start(Job([*arguments, "--prompt-file", "/dev/zero"], folder())).end(), [2], "too long")

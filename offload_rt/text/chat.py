"""Chat templates: programs of whoever made a checkpoint, run where they can do no harm."""

import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from offload_rt.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# What a template may take beyond what this process has; those of real models take milliseconds and kilobytes.
_CPU_S, _NBYTES, _MOST_TEXT = 5, 256 << 20, 16 << 20
# A child that stands still, whatever it waits for; with others at the same cores, much less CPU time takes as long.
_PATIENCE_S = 60.0


def render(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> str:
    """The user's turn of a chat as text, through the model's template.

    Raises PromptError if there is no template, or it fails, or it takes more than a template may.
    """
    if not tokenizer.chat_template:
        raise PromptError("the model has no chat template", change="leave out --chat")
    turns = [{"role": "user", "content": prompt}]
    text, failure = _limited(lambda: tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))
    if failure:
        raise PromptError(f"the model's chat template failed: {failure}", change="leave out --chat")
    return text


def _limited(work: Callable[[], str]) -> tuple[str, str]:
    """What `work` returns in a child with little time and memory, and why it returned nothing; one of the two is empty.

    The sandbox of jinja keeps a template from files and from the interpreter, but not from looping for ever, nor from one
    product that fills the memory; no exception of this process could stop that one.
    """
    answers, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(work, theirs)
    os.close(theirs)
    try:
        raw = _read_all(answers)
    finally:
        os.close(answers)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    try:
        text, failure = json.loads(raw)
    except ValueError:  # it was stopped before it had answered
        return "", f"it takes more than {_CPU_S} s, or than {_NBYTES >> 20} MiB"
    return text, failure


def _read_all(file: int) -> bytes:
    """All until the other side closes, or patience is over."""
    raw, until = bytearray(), time.monotonic() + _PATIENCE_S
    while select.select([file], [], [], max(until - time.monotonic(), 0))[0] and (more := os.read(file, 1 << 20)):
        raw += more
    return bytes(raw)


def _answer(work: Callable[[], str], answers: int) -> None:
    """Do the work and end this process, which is a child and shares everything with its parent, without cleaning up."""
    try:
        _be_small()
        answer = "", "its text is endless"
        if len(text := work()) <= _MOST_TEXT:
            answer = text, ""
    except BaseException as error:
        answer = "", " ".join(str(error).split())[:200] or type(error).__name__
    try:
        with os.fdopen(answers, "wb") as file:
            file.write(json.dumps(answer).encode())
    finally:
        os._exit(0)


def _be_small() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limits = {
        resource.RLIMIT_CPU: _CPU_S,
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGESIZE") + _NBYTES,
        resource.RLIMIT_CORE: 0,
    }
    for kind, value in limits.items():
        _, hard = resource.getrlimit(kind)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (least, least))

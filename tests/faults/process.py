"""Starting a run of the command line, disturbing it, and judging how it ended: one judgement for all faults."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from test_command_line import ROOT, command

from faults.injected import Failure

PATIENCE_S = 120.0  # what takes so long, even on a busy machine, has hung
_NAP_S = 0.002
_PATH = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"


@dataclass(frozen=True)
class Job:
    """A run of the command line, and what is wrong with the world in which it runs.

    folder       its working folder, empty before, and where its streams go
    cache        its cache folder; None: one below `folder`
    environment  variables beside its cache
    failures     calls that fail, limits: see `injected`
    stdin        bytes it may read
    closed       which of its streams 0, 1, 2 are closed when it starts
    stdout       a file descriptor instead of a file in `folder`; and so stderr
    """

    arguments: Sequence[str]
    folder: Path
    program: str = "run"
    cache: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[Failure] = ()
    limits: Mapping[str, int] = field(default_factory=dict)
    stdin: bytes = b""
    closed: Sequence[int] = ()
    stdout: int | None = None
    stderr: int | None = None

    @property
    def cache_home(self) -> Path:
        """What XDG_CACHE_HOME is for it."""
        return self.cache or self.folder / "cache"

    @property
    def variables(self) -> dict[str, str]:
        """What it finds in its environment besides the usual."""
        return {"XDG_CACHE_HOME": str(self.cache_home), "OMP_NUM_THREADS": "1", **self.environment}


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    seconds  from the disturbance, or from its start
    n_left   processes it has left behind
    """

    job: Job
    code: int
    out: str
    err: str
    seconds: float
    n_left: int


@dataclass
class Running:
    """A process under way; `wait` returns its exit code, negative for a signal."""

    job: Job
    pid: int
    wait: Callable[[], int]

    def said(self) -> bytes:
        """What stands on its stdout so far."""
        return (self.job.folder / "stdout").read_bytes()

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until something holds, or the process is gone."""
        until = time.perf_counter() + PATIENCE_S
        while psutil.pid_exists(self.pid) and time.perf_counter() < until and not ready():
            time.sleep(_NAP_S)

    def has_begun(self) -> bool:
        """Whether the program's own first line has run: it catches SIGTERM from then on."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return False
        caught = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def send(self, number: int) -> None:
        """Send a signal, if it is still there."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def end(self) -> Ended:
        """Wait for its end, killing it when patience is over."""
        started, watch = time.perf_counter(), threading.Timer(PATIENCE_S, self.send, (signal.SIGKILL,))
        watch.start()
        code = self.wait()
        watch.cancel()
        seconds = time.perf_counter() - started
        left = [one for one in psutil.pids() if _session(one) == self.pid]
        out, err = (
            (self.job.folder / name).read_bytes().decode(errors="surrogateescape") for name in ("stdout", "stderr")
        )
        return Ended(self.job, code, out, err, seconds, len(left))


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _streams(job: Job) -> list[int]:
    (job.folder / "stdin").write_bytes(job.stdin)
    names = (("stdin", os.O_RDONLY, None), ("stdout", os.O_WRONLY, job.stdout), ("stderr", os.O_WRONLY, job.stderr))
    opened = [os.open(job.folder / name, flags | os.O_CREAT) for name, flags, _ in names]
    return [own if given is None else os.dup(given) for own, (_, _, given) in zip(opened, names, strict=True)]


# Lowers the limits of a process and closes some of its streams before the program is there to notice.
_PREPARE = """
import json, os, signal, sys
from faults.injected import limit
limits, closed, *command = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
limit(json.loads(limits))
for stream in json.loads(closed):
    os.close(stream)
os.execv(command[0], command)
"""


def start_fresh(job: Job) -> Running:
    """Start a process of its own, imports and all."""
    assert not job.failures, "only a fork of the zygote has calls that fail"
    streams = _streams(job)
    line = command(*job.arguments, program=job.program)
    process = subprocess.Popen(
        [sys.executable, "-c", _PREPARE, json.dumps(dict(job.limits)), json.dumps(list(job.closed)), *line],
        stdin=streams[0], stdout=streams[1], stderr=streams[2], cwd=job.folder, start_new_session=True,
        env=os.environ | {"PYTHONPATH": _PATH} | job.variables,
    )  # fmt: skip
    for stream in streams:
        os.close(stream)
    return Running(job, process.pid, process.wait)


class Zygote:
    """The other side of `zygote.py`: a process that forks runs."""

    def __init__(self, rehearsal: Sequence[str], cache: Path) -> None:
        """rehearsal: arguments of a run it makes before the first fork."""
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "faults.zygote", str(theirs.fileno()), *rehearsal],
            pass_fds=[theirs.fileno()], cwd=tempfile.gettempdir(),
            env=os.environ | {"PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
        )  # fmt: skip
        theirs.close()
        assert self._control.recv(16) == b"ready", "the rehearsal failed"

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def start(self, job: Job) -> Running:
        """Fork a run."""
        mine, theirs = socket.socketpair()
        streams = _streams(job)
        request = {
            "program": job.program, "arguments": list(job.arguments), "folder": str(job.folder),
            "environment": job.variables, "limits": dict(job.limits), "failures": [asdict(one) for one in job.failures],
            "closed": list(job.closed),
        }  # fmt: skip
        with self._lock:
            socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno(), *streams])
        theirs.close()
        for stream in streams:
            os.close(stream)
        answers = mine.makefile("r")

        def wait() -> int:
            with mine, answers:
                return int(answers.readline())

        return Running(job, int(answers.readline()), wait)

    def close(self) -> None:
        """End it."""
        self._control.close()
        self._process.wait(PATIENCE_S)


def judge(
    ended: Ended, codes: Collection[int], *words: str, text: str | None = None, beside: Path | None = None
) -> None:
    """What holds for every fault. Raises AssertionError where it does not.

    codes   exit codes that fit
    words   what the sentence on stderr has to say
    text    what the run would have printed undisturbed; None: not to be compared
    beside  the model's folder, in which nothing may have been left
    """
    told = (
        f"{ended.job.arguments}: exit code {ended.code}, after {ended.seconds:.1f} s\n{ended.out[-300:]}\n{ended.err}"
    )
    assert ended.code in codes, told
    assert ended.seconds < PATIENCE_S / 2, told
    assert ended.n_left == 0, told
    lines = ended.err.splitlines()
    sentences = [line for line in lines if line.startswith("error: ") or line == "interrupted"]
    assert len(lines) == len(sentences) <= 1, told
    if ended.code in (2, 3) and ended.job.stderr is None:
        assert lines and len(lines[0]) < 2000, told
    assert all(word in ended.err for word in words), f"{words}: {told}"
    if text is not None and ended.job.stdout is None:
        assert ended.out == text if ended.code == 0 else text.startswith(ended.out.removesuffix("\n")), told
    _check_files(ended.job.cache_home)
    if beside is not None:
        odd = [path.name for path in beside.iterdir() if path.suffix not in (".json", ".safetensors", ".jinja")]
        assert not odd, odd


def _check_files(cache: Path) -> None:
    """Every file of a cache folder is whole, and none is temporary."""
    for path in (cache / "offload_rt").glob("*") if (cache / "offload_rt").is_dir() else ():
        assert path.suffix == ".json" and not path.name.startswith("."), path
        content = json.loads(path.read_text())
        assert set(content) == {"version", "entries"}, path

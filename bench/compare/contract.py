"""Job and report of a peer."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Protocol


@dataclass(frozen=True)
class Job:
    """Input of all peers.

    plain       the checkpoint for systems that do not read the model's format: its weights as
                floats; else the model
    budget      bytes of device memory for offloading peers; on a CPU, of memory
    n_resident  layers that fit into the budget beside everything else, for peers that do not decide
                it themselves
    max_len     most tokens of prompt and answer together
    scratch     folder for files of its own
    limit       memory limit of the process in bytes, page cache included; None: unlimited
    head        draft head of offload_rt; None: the draft
    gguf        the weights as a GGUF file, for llama.cpp
    activations  of offload_rt
    """

    model: Path
    plain: Path
    draft: Path
    budget: int
    n_resident: int
    max_len: int
    scratch: Path
    limit: int | None = None
    head: Path | None = None
    gguf: Path | None = None
    activations: str = "exact"

    def text(self) -> str:
        """As JSON, for another process."""
        return json.dumps(vars(self), default=str)

    @classmethod
    def of(cls, text: str) -> "Job":
        """Parse the output of `text`."""
        raw = json.loads(text)
        paths = ("model", "plain", "draft", "scratch", "head", "gguf")
        return cls(**raw | {name: Path(raw[name]) for name in paths if raw[name]})


@dataclass(frozen=True)
class Supply:
    """Traffic of a pass over the weights.

    source      "disk", "host" (over the link from CPU memory to the device) or "memory" (read where
                it is computed)
    pass_bytes  bytes from this source per pass
    """

    source: str
    pass_bytes: int


@dataclass(frozen=True)
class Answer:
    """The continuation of a prompt.

    arrivals  (seconds since the call, new tokens by then) after each pass, without the time for
              making caches cold
    """

    token_ids: list[int]
    arrivals: list[tuple[float, int]]


class Peer(Protocol):
    """A loaded model."""

    supply: Supply

    def generate(self, prompt: list[int], n: int) -> Answer:
        """Continue a prompt greedily by at most n tokens."""

    def close(self) -> None:
        """Stop threads and processes."""


@dataclass(frozen=True)
class Report:
    """Last line of a peer's process.

    read_bytes     that storage delivered during each answer
    device_bytes   peak of the device's memory; 0 on a CPU
    child_bytes    peak resident memory of its child processes
    versions       of the packages it needs
    """

    load_s: float
    supply: Supply
    answers: list[Answer]
    read_bytes: list[int]
    device_bytes: int
    versions: dict[str, str]
    child_bytes: int = 0

    def text(self) -> str:
        """As one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, raw: dict) -> "Report":
        """Convert the parsed output of `text`."""
        answers = [
            Answer(answer["token_ids"], [(s, n) for s, n in answer["arrivals"]])
            for answer in raw["answers"]
        ]
        return cls(**raw | {"supply": Supply(**raw["supply"]), "answers": answers})


@dataclass(frozen=True)
class System:
    """A system to compare.

    title     what a reader calls it
    load      loads the model of a job
    packages  it needs, by the names they are imported by
    drafts    whether it drafts tokens with the job's draft model: it is compared with those that do
    unfit     why it cannot run on this machine although they are installed; None where it can
    limited   runs in a control group with a memory limit
    """

    title: str
    load: Callable[[Job], Peer]
    packages: tuple[str, ...] = ()
    drafts: bool = False
    unfit: Callable[[], str | None] = lambda: None
    limited: bool = False

    def refusal(self) -> str | None:
        """Why it cannot run here; None where it can."""
        missing = [name for name in self.packages if find_spec(name) is None]
        return f"not installed: {', '.join(missing)}" if missing else self.unfit()


def _modules() -> list[str]:
    folder = import_module("bench.compare.peers").__path__
    return [module.name for module in iter_modules(folder) if module.name != "__main__"]


def _peers(module: str) -> dict[str, System]:
    return import_module(f"bench.compare.peers.{module}").PEERS


def names() -> tuple[str, ...]:
    """All peers, sorted."""
    return tuple(sorted(name for module in _modules() for name in _peers(module)))


def find(name: str) -> System:
    """Return a peer; imports its module only."""
    module = next(module for module in _modules() if name.startswith(module))
    return _peers(module)[name]

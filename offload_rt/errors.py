"""Errors for users: one class per cause, with an exit code.

A message names the failed operation (`problem`), the required value (`need`), the actual value
(`have`), and the setting or file to change (`change`).
Messages in the code name a setting as a flag, with a value after "=": `--link-format=raw`. Each
interface names it in its own form. Command lines are in backticks and keep their form.
"""

import errno
import re
from typing import Self

# Messages of allocators, threads and the dynamic loader without memory.
_NO_MEMORY = (
    "can't allocate memory",
    "out of memory",
    "can't start new thread",
    "bad_alloc",
    "failed to map segment",
    "Cannot allocate memory",
)
# Driver messages for an unavailable GPU. Other driver errors ("an illegal memory access") are bugs.
_NO_GPU = (
    "CUDA-capable device",
    "CUDA driver version is insufficient",
    "CUDA driver initialization failed",
    "CUDA error: initialization error",
    "CUDA error: uncorrectable ECC error",
    "CUDA error: unknown error",
    "Found no NVIDIA driver",
    "NVIDIA driver on your system is too old",
)

# A command line in backticks, or a setting with an optional value.
_SETTING = re.compile(r"`[^`]*`|(?<![\w-])--([a-z](?:[a-z-]*[a-z])?)(?:=([^\s,;:]+))?")

# Last message of an interrupted program.
INTERRUPTION = "interrupted"


class OffloadError(Exception):
    """A failure of the machine: memory, disk, driver, numbers.

    `str` names settings as arguments of Python and fields of requests, `for_command_line` as flags.
    """

    exit_code = 3

    def __init__(self, problem: str, *, need: str = "", have: str = "", change: str = "") -> None:
        self.problem = problem
        self.need = need
        self.have = have
        self.change = change
        facts = ", ".join(filter(None, (need and f"needs {need}", have and f"has {have}")))
        sentence = f"{problem}: {facts}" if facts else problem
        self._sentence = _one_line(f"{sentence}; {change}" if change else sentence)
        super().__init__(_SETTING.sub(_as_argument, self._sentence))

    @property
    def for_command_line(self) -> str:
        """The sentence with flags."""
        return _SETTING.sub(_as_flag, self._sentence)

    def prefixed(self, prefix: str) -> Self:
        """Return a copy whose problem begins with `prefix`."""
        problem = f"{prefix}: {self.problem}"
        return type(self)(problem, need=self.need, have=self.have, change=self.change)


def _as_flag(match: re.Match[str]) -> str:
    """`--link-format=raw` is `--link-format raw`."""
    name, value = match.groups()
    return match[0] if value is None else f"--{name} {value}"


def _as_argument(match: re.Match[str]) -> str:
    """`--link-format=raw` is `link_format="raw"`, `--tree-size` is `tree_size`."""
    name, value = match.groups()
    if name is None:
        return match[0]
    argument = name.replace("-", "_")
    if value is None:
        return argument
    return f"{argument}={value}" if value.isdigit() else f'{argument}="{value}"'


def _one_line(text: str) -> str:
    """Escape control characters and shorten long texts, because file contents enter messages."""
    text = text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


class UserError(OffloadError):
    """Invalid input or settings."""

    exit_code = 2


class SettingsError(UserError):
    """An unknown, malformed or contradictory setting."""


class UnsupportedModelError(UserError):
    """An unsupported config.json."""


class CheckpointError(UserError):
    """A missing, incomplete or damaged checkpoint."""


class TraceError(UserError):
    """A file other than a complete timeline."""


class PromptError(UserError):
    """An invalid prompt."""


class CapacityError(UserError):
    """A memory budget or context length below the required size."""


class CacheError(OffloadError, RuntimeWarning):
    """An unwritable cache folder: a warning during runs, an error of `offload-rt calibrate`."""


class LinkError(OffloadError):
    """A failed or short read of weights."""


class DeviceError(OffloadError):
    """A missing device, or a failure of its driver or memory."""


class RankError(OffloadError):
    """A failure of a different rank: its number and last message, None if unknown."""

    def __init__(self, problem: str, rank: int | None = None, said: str | None = None) -> None:
        super().__init__(problem)
        self.rank = rank
        self.said = said


class NumericsError(OffloadError):
    """NaN or Inf in a computation of the model."""


def config_error(
    problem: str, *, need: str = "", have: str = "", change: str = ""
) -> UnsupportedModelError:
    """Return the error for an unsupported config.json."""
    return UnsupportedModelError(f"config.json: {problem}", need=need, have=have, change=change)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise UnsupportedModelError unless a value of config.json is an integer in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise config_error(f"{name} is {value!r}", need=f"an integer from {low} to {high}")


def machine_error(error: BaseException) -> OffloadError:
    """Convert a failure of the machine; reraise bugs of this program."""
    text = " ".join(str(error).split())
    is_full = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if isinstance(error, RuntimeError | ImportError):
        is_full |= any(words in text for words in _NO_MEMORY)
    if is_full:
        change = "lower --device-memory, --host-memory or --max-model-len"
        return DeviceError("out of memory", have=text[:200], change=change)
    if isinstance(error, RuntimeError) and any(words in text for words in _NO_GPU):
        change = "stop other programs on the GPU, see nvidia-smi, or use --device=cpu"
        return DeviceError("CUDA device unavailable", have=text[:200], change=change)
    if isinstance(error, OSError):
        problem = f"{error.filename or 'the machine'}: {error.strerror or text}"
        return DeviceError(problem, change="check the disk and its free space")
    raise error

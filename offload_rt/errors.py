"""Failures a user can cause or meet: one class each, one clear sentence, one exit code.

Every message says what was needed, what there is, and what to change.
"""

import errno

# How allocators, threads and the loader of libraries say that memory is out.
_NO_MEMORY = (
    "can't allocate "
    "memory", "out of memory", "can't start new thread", "bad_alloc", "failed to map segment",
    "Cannot allocate memory",
)  # fmt: skip
# How the driver says that the card cannot be had. Its other errors ("an illegal memory access") are
# faults of this program.
_NO_CARD = (
    "CUDA-capable "
    "device", "CUDA driver version is insufficient", "CUDA driver initialization failed",
    "CUDA error: initialization "
    "error", "CUDA error: uncorrectable ECC error", "CUDA error: unknown error",
    "Found no NVIDIA driver", "NVIDIA driver on your system is too old",
)  # fmt: skip

# What a program says that was interrupted.
INTERRUPTION = "interrupted"


class OffloadError(Exception):
    """The machine could not: memory, disk, driver, numbers.

    problem  what failed
    need     what was needed, have  what there is, change  which setting or file to change
    """

    exit_code = 3

    def __init__(self, problem: str, *, need: str = "", have: str = "", change: str = "") -> None:
        self.problem = problem
        self.need = need
        self.have = have
        self.change = change
        facts = ", ".join(
            f"{verb} {fact}" for verb, fact in (("needs", need), ("has", have)) if fact
        )
        sentence = f"{problem}: {facts}" if facts else problem
        super().__init__(_one_line(f"{sentence}; {change}" if change else sentence))


def _one_line(text: str) -> str:
    """A sentence that a terminal shows as one, whatever a file has put into it: no control
    characters, not endless.
    """
    text = text if len(text) <= 1000 else f"{text[:500]} ... {text[-500:]}"
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


class UserError(OffloadError):
    """The user's input or settings."""

    exit_code = 2


class SettingsError(UserError):
    """A setting that is unknown, malformed or contradicts another."""


class UnsupportedModelError(UserError):
    """A config.json that is not understood."""


class CheckpointError(UserError):
    """A checkpoint that is missing, incomplete or damaged."""


class TraceError(UserError):
    """A file that is not the timeline of a run, or not all of it."""


class PromptError(UserError):
    """A prompt that cannot be continued."""


class CapacityError(UserError):
    """A memory budget or context length that is too small for what was asked."""


class LinkError(OffloadError):
    """Weights could not be moved: a read failed or came up short."""


class DeviceError(OffloadError):
    """The device is missing, or its driver or memory refused."""


class RankError(OffloadError):
    """Another rank of the run has failed.

    rank, said  which, and the sentence that it ended with; None where that is not known
    """

    def __init__(self, problem: str, rank: int | None = None, said: str | None = None) -> None:
        super().__init__(problem)
        self.rank = rank
        self.said = said


class NumericsError(OffloadError):
    """The model computed something that is not a number."""


def machine_error(error: BaseException) -> OffloadError:
    """A failure of the machine in one sentence. Raises anything that is a fault of this program
    again.
    """
    text = " ".join(str(error).split())
    full = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    if full or (
        isinstance(error, RuntimeError | ImportError) and any(words in text for words in _NO_MEMORY)
    ):
        change = "lower --device-memory, --host-memory or --max-model-len"
        return DeviceError("out of memory", have=text[:200], change=change)
    if isinstance(error, RuntimeError) and any(words in text for words in _NO_CARD):
        change = "end what else uses it, see nvidia-smi, or use --device cpu"
        return DeviceError("the card cannot be used", have=text[:200], change=change)
    if isinstance(error, OSError):
        problem = f"{error.filename or 'the machine'}: {error.strerror or text}"
        return DeviceError(problem, change="check the disk and its free space")
    raise error

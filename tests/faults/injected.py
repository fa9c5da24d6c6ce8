"""Failures of the system that a test asks for, put under a program before it starts: calls of `os` and `io` that fail.

Not part of the product, which knows nothing of it: a test's process loads this and then runs the program as it is.
"""

import io
import itertools
import os
import resource
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

MODULES = {"open": io}


@dataclass(frozen=True)
class Failure:
    """One call that fails.

    call    name of a function of `os`, or `open`, of which only opening to write is meant
    errno   what it fails with
    after   calls that still work
    within  part of the path that the call is about; empty: any
    """

    call: str
    errno: int
    after: int = 0
    within: str = ""


def inject(failures: Iterable[Failure]) -> None:
    """From now on these calls fail in this process."""
    for failure in failures:
        module = MODULES.get(failure.call, os)
        setattr(module, failure.call, _failing(getattr(module, failure.call), failure))


def _failing(call: Callable[..., Any], failure: Failure) -> Callable[..., Any]:
    count = itertools.count()

    def instead(*args: Any, **kwargs: Any) -> Any:
        mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
        meant = failure.within in str(args[0]) and (failure.call != "open" or not str(mode).startswith("r"))
        if meant and next(count) >= failure.after:
            raise OSError(failure.errno, os.strerror(failure.errno), str(args[0]) if failure.call == "open" else None)
        return call(*args, **kwargs)

    return instead


def limit(limits: dict[str, int]) -> None:
    """Lower limits of this process: name of a `resource.RLIMIT_...` without that prefix -> value."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

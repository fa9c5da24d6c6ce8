"""Functions compiled by numba: kept on the disk where a folder can be written, compiled anew in each run where none can."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(
    *, fastmath: bool | set[str] = False, nogil: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to be compiled when it is first called. fastmath, nogil: as numba's `njit` takes them."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, fastmath=fastmath, nogil=nogil)(function)
        except RuntimeError:  # no folder that numba knows of can be written
            return njit(fastmath=fastmath, nogil=nogil)(function)

    return decorate

"""Functions compiled by numba, cached on disk if possible."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(
    *, fastmath: bool | set[str] = False, nogil: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function for compilation at the first call; arguments as in numba's `njit`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            return njit(cache=True, fastmath=fastmath, nogil=nogil)(function)
        except RuntimeError:  # no writable cache folder
            return njit(fastmath=fastmath, nogil=nogil)(function)

    return decorate

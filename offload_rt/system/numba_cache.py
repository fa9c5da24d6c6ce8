"""Functions compiled by numba, cached on disk if possible."""

import warnings
from collections.abc import Callable
from typing import Any

from offload_rt.system.files import cache_directory

try:
    from numba import config, njit
except ImportError as error:  # numba refuses a newer numpy, too
    warnings.warn(f"functions for numba stay interpreted: {error}", stacklevel=2)
    njit = None  # type: ignore[assignment]


def compiled(
    *, fastmath: bool | set[str] = False, nogil: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate as numba's `njit`, compiled at the first call; interpreted without numba."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if njit is None:
            return function
        settings: Any = config
        folder = settings.CACHE_DIR
        try:
            # The default is __pycache__ of the package, whose files `pip uninstall` would leave.
            settings.CACHE_DIR = folder or str(cache_directory() / "numba")
            return njit(cache=True, fastmath=fastmath, nogil=nogil)(function)
        except RuntimeError:  # no writable cache folder
            return njit(fastmath=fastmath, nogil=nogil)(function)
        finally:
            settings.CACHE_DIR = folder

    return decorate

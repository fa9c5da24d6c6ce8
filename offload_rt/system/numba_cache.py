"""Functions compiled by numba: kept on the disk where that can be done, compiled anew in each run where it cannot."""

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a function to be compiled when it is first called; `options` are those of numba's `njit`."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        dispatcher = njit(**options)(function)
        try:
            dispatcher._cache = _Kept(function)
        except RuntimeError:
            pass  # no folder that numba knows of can be written
        return dispatcher

    return decorate


class _Kept(FunctionCache):
    """numba's own, without which a run goes on: a full disk, a damaged index, a file of another version end no run."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # it unpickles whatever stands there, which may raise anything
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception:  # it reads the index once more
            return

"""Folders as registries: `--drafter ngram` is `speculate/draft/ngram.py`."""

from difflib import get_close_matches
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from offload_rt.errors import SettingsError

_KINDS = {"speculate.draft": "drafter", "speculate.verify": "verification rule"}


def names(folder: str) -> tuple[str, ...]:
    """Return the sorted entries of a package folder, e.g. "speculate.draft"."""
    package = import_module(f"offload_rt.{folder}")
    return tuple(sorted(module.name for module in iter_modules(package.__path__)))


def find(folder: str, name: str) -> ModuleType:
    """Import `offload_rt.<folder>.<name>`. Raises SettingsError for an unknown entry."""
    if name not in names(folder):
        kind = _KINDS.get(folder, folder.rpartition(".")[2])
        close = get_close_matches(name, names(folder), n=1)
        raise SettingsError(
            f"no {kind} called {name!r}",
            need="one of " + ", ".join(names(folder)),
            change=f"did you mean {close[0]}?" if close else "use one of these",
        )
    return import_module(f"offload_rt.{folder}.{name}")

"""Folders as registries: `--drafter ngram` is `speculate/draft/ngram.py`."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from offload_rt.errors import SettingsError


def names(folder: str) -> tuple[str, ...]:
    """Return the sorted entries of a package folder, e.g. "speculate.draft"."""
    package = import_module(f"offload_rt.{folder}")
    return tuple(sorted(module.name for module in iter_modules(package.__path__)))


def find(folder: str, name: str) -> ModuleType:
    """Import `offload_rt.<folder>.<name>`. Raises SettingsError for an unknown entry."""
    if name not in names(folder):
        kind = folder.rpartition(".")[2]
        raise SettingsError(
            f"no {kind} entry called {name!r}",
            have=", ".join(names(folder)),
            change="use one of the available entries",
        )
    return import_module(f"offload_rt.{folder}.{name}")

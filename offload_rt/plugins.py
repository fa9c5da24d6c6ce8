"""The folder is the registry: `--drafter ngram` is `drafters/ngram.py`."""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from offload_rt.errors import SettingsError


def names(folder: str) -> tuple[str, ...]:
    """The entries of a folder of the package, sorted; a leading underscore marks a shared part."""
    package = import_module(f"offload_rt.{folder}")
    found = (module.name for module in iter_modules(package.__path__))
    return tuple(sorted(name for name in found if not name.startswith("_")))


def find(folder: str, name: str) -> ModuleType:
    """The module `offload_rt/<folder>/<name>.py`.

    Raises SettingsError if the folder has no such entry.
    """
    if name not in names(folder):
        raise SettingsError(
            f"no {folder} entry called {name!r}", have=", ".join(names(folder)), change="use one of these"
        )
    return import_module(f"offload_rt.{folder}.{name}")

"""Command-line flags, generated from the fields of settings classes."""

import argparse
import re
import sys
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from offload_rt.config import flag_of
from offload_rt.errors import SettingsError
from offload_rt.system import registry

# Flags with the entries of a folder as choices.
_FOLDERS = {"drafter": "speculate.draft", "rule": "speculate.verify"}

Settings = TypeVar("Settings")


class Parser(argparse.ArgumentParser):
    """Parser of a command. Raises SettingsError for a wrong flag, instead of printing the usage.

    classes  settings classes
    without  fields without a flag
    """

    def __init__(
        self, program: str, description: str, *classes: type, without: tuple[str, ...] = ()
    ) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        for cls in classes:  # "EngineConfig" is the group "engine config"
            group = self.add_argument_group(
                re.sub("(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()
            )
            for item in fields(cls):
                if item.name not in without:
                    _add_flag(group, item)

    def print_help(self, file: Any = None) -> None:
        """Print the help. Raises OSError on a failed write, which argparse ignores."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with argparse's message and the most similar flag."""
        wrong = message.removeprefix("unrecognized arguments: ")
        flag = wrong.split()[0].split("=")[0] if wrong != message else ""
        close = get_close_matches(flag, self._option_string_actions, n=1)
        raise SettingsError(
            message, change=f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        )


def _add_flag(group: "argparse._ArgumentGroup", item: Field[Any]) -> None:
    flag = flag_of(item.name)
    text = item.metadata["help"]
    default = item.default
    if item.name in _FOLDERS:
        text += f"; one of auto, {', '.join(registry.names(_FOLDERS[item.name]))}"
    if "default:" not in text:
        text += "; default: %(default)s"
    if item.metadata["parse"] is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=text)
    elif isinstance(default, bool):
        group.add_argument(flag, action="store_true", help=text)
    elif isinstance(default, tuple):
        group.add_argument(
            flag, action="append", metavar="TEXT", type=item.metadata["parse"], help=text
        )
    else:
        kind = item.metadata["parse"]
        choices = item.metadata["choices"] or None
        is_missing = default is MISSING
        default = None if is_missing else default
        group.add_argument(
            flag, default=default, required=is_missing, type=kind, choices=choices, help=text
        )


def from_flags(cls: type[Settings], namespace: argparse.Namespace) -> Settings:
    """Build settings from parsed flags. Raises SettingsError for invalid values."""
    values = {item.name: getattr(namespace, item.name, None) for item in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    return cls(
        **{
            name: tuple(v) if isinstance(v, list) else v
            for name, v in values.items()
            if v is not None
        }
    )

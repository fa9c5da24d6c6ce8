"""Flags of the command line, made of the fields of settings."""

import argparse
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from offload_rt.config import flag_of
from offload_rt.errors import SettingsError

Settings = TypeVar("Settings")


class Parser(argparse.ArgumentParser):
    """The flags of a program, of which one that is wrong raises SettingsError: a sentence, not a page.

    classes  the settings whose fields are its flags
    without  names of fields that are none
    """

    def __init__(self, program: str, description: str, *classes: type, without: tuple[str, ...] = ()) -> None:
        super().__init__(prog=program, description=description, allow_abbrev=False)
        for item in (item for cls in classes for item in fields(cls)):
            if item.name not in without:
                self._add_flag(item)

    def error(self, message: str) -> NoReturn:
        """Raises SettingsError with what argparse says, and the flag that may have been meant."""
        wrong = message.removeprefix("unrecognized arguments: ")
        flag = wrong.split()[0].split("=")[0] if wrong != message else ""
        close = get_close_matches(flag, self._option_string_actions, n=1)
        raise SettingsError(message, change=f"did you mean {close[0]}?" if close else f"see {self.prog} --help")

    def _add_flag(self, item: Field[Any]) -> None:
        flag, text = flag_of(item.name), item.metadata["help"]
        if isinstance(item.default, bool):
            self.add_argument(flag, action="store_true", help=text)
        elif isinstance(item.default, tuple):
            self.add_argument(flag, action="append", metavar="TEXT", type=item.metadata["parse"], help=text)
        else:
            self.add_argument(
                flag,
                default=None if item.default is MISSING else item.default,
                required=item.default is MISSING,
                type=item.metadata["parse"],
                choices=item.metadata["choices"] or None,
                help=text,
            )


def from_flags(cls: type[Settings], namespace: argparse.Namespace) -> Settings:
    """Build settings from parsed flags. Raises SettingsError as the class's own checks do."""
    values = {item.name: getattr(namespace, item.name, None) for item in fields(cls)}  # type: ignore[arg-type]  # a dataclass
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if v is not None})

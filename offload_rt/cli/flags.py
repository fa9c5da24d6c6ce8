"""Command-line flags, generated from the fields of settings classes."""

import argparse
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, NoReturn, TypeVar

from offload_rt.config import EngineConfig, flag_of, parser_of
from offload_rt.errors import SettingsError
from offload_rt.system import registry

# Flags with the entries of a folder as choices.
FOLDERS = {"drafter": "speculate.draft", "rule": "speculate.verify"}

# A quoted text, or a flag with its value.
_TOGETHER = re.compile(r'"[^"]*"|--[a-z-]+ [^-\s]\S*')

Settings = TypeVar("Settings")

# Values of flags, by the name of their parser.
_NEEDS = {
    "int": "an integer",
    "float": "a number",
    "_bias_by_id": 'JSON like {"50256": -100}',
    "_token_ids": "numbers like 15,7",
}

# Groups of the help. Fields of other classes belong to the group of their class.
_ENGINE_GROUPS = {
    "model": "model draft_model dtype revision offline chat_template",
    "memory": "device device_memory host_memory kv_memory kv_dtype max_model_len max_num_seqs"
    " max_image_pixels link_format sidecar mirror",
    "drafting": "drafter rule tree_size tree_depth draft_context draft_quantize draft_predictions"
    " learn_draft torch_products activations",
    "ranks": "exact_parallel split_draft pipeline",
}
GROUP_OF_FIELD = {name: group for group, names in _ENGINE_GROUPS.items() for name in names.split()}


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wrap the description, and each example as a command of several lines."""

    def _expand_help(self, action: argparse.Action) -> str:
        return (super()._expand_help(action) or "").replace("default: None", "default: no limit")

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        title, *examples = text.splitlines()
        lines = [textwrap.fill(title, width)]
        for example in examples:
            # Keep quoted texts, and flags with their values, in a line. Its end has a backslash.
            kept = _TOGETHER.sub(lambda match: match[0].replace(" ", "\0"), example)
            parts = textwrap.wrap(
                kept, width - 2, initial_indent="  ", subsequent_indent=" " * 6,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            lines.append(" \\\n".join(parts).replace("\0", " "))
        return "\n".join(lines) + "\n"


class Parser(argparse.ArgumentParser):
    """Parser of a command. Raises SettingsError for a wrong flag, instead of printing the usage.

    Required fields, and `prompt`, may also be given without their flags, in this order.

    classes   settings classes
    without   fields without a flag
    examples  command lines at the end of the help
    defaults  values of fields instead of their own defaults
    """

    def __init__(
        self,
        program: str,
        description: str,
        *classes: type,
        without: tuple[str, ...] = (),
        examples: tuple[str, ...] = (),
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        items = {
            item.name: (cls, item)
            for cls in classes
            for item in fields(cls)
            if item.metadata and item.name not in without
        }
        self._positionals_by_name = {
            name: item.default is MISSING
            for name, (_, item) in items.items()
            if item.default is MISSING or name == "prompt"
        }
        names = " ".join(f"[{name.upper()}]" for name in self._positionals_by_name)
        super().__init__(
            prog=program,
            usage=f"{program} {names} [OPTIONS]" if items else None,
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            epilog="\n".join(["examples:", *examples]) if examples else None,
        )
        if names:
            text = "like " + " and ".join(f"--{name}" for name in self._positionals_by_name)
            self.add_argument("positionals", nargs="*", metavar=names, help=text)
        titles = [GROUP_OF_FIELD.get(name) or _group_of(cls) for name, (cls, _) in items.items()]
        groups = {title: self.add_argument_group(title) for title in dict.fromkeys(titles)}
        for title, (_, item) in zip(titles, items.values(), strict=True):
            default = item.default
            kind = parser_of(item)
            text = item.metadata["help"]
            if item.name in FOLDERS:
                text += f"; one of auto, {', '.join(registry.names(FOLDERS[item.name]))}"
            has_default = default not in (None, MISSING, (), "") and not isinstance(default, bool)
            if has_default and "default:" not in text:
                text += "; default: %(default)s"
            options: dict[str, Any] = {"type": kind, "choices": item.metadata["choices"] or None}
            if kind is bool:
                action = argparse.BooleanOptionalAction if default is None else "store_true"
                options = {"action": action}
            elif isinstance(default, tuple):
                options = {"action": "append", "metavar": "TEXT", "type": kind}
            elif default is not MISSING:
                options["default"] = default
            groups[title].add_argument(flag_of(item.name), help=text, **options)
        self.set_defaults(**(defaults or {}))

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse flags and positional arguments. Raises SettingsError."""
        if not self._positionals_by_name:
            return super().parse_args(args, namespace)
        parsed = self.parse_intermixed_args(args, namespace)
        values = list(parsed.positionals)
        for name, is_required in self._positionals_by_name.items():
            if values and not (is_required and getattr(parsed, name)):
                value = values.pop(0)
                setattr(parsed, name, value if is_required else [*(parsed.prompt or []), value])
            if is_required and not getattr(parsed, name):
                raise SettingsError(self.prog, need=f"a {name}", change=f"see {self.prog} --help")
        if values:
            surplus = f"unrecognized arguments: {' '.join(values)}"
            if "prompt" not in self._positionals_by_name:
                self.error(surplus)
            change = "quote a prompt with spaces; repeat --prompt for several prompts"
            raise SettingsError(surplus, change=change)
        return parsed

    def print_help(self, file: Any = None) -> None:
        """Print the help. Raises OSError on a failed write, which argparse ignores."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Raise SettingsError with argparse's message and the most similar flag or choice."""
        wrong = message.removeprefix("unrecognized arguments: ")
        flag = wrong.split()[0].split("=")[0] if wrong != message else ""
        close = get_close_matches(flag, self._option_string_actions, n=1)
        if match := re.fullmatch(r"argument (\S+): invalid (\w+)( value)?: '(.*?)'( .*)?", message):
            name, kind, _, value, choices = match.groups()
            # argparse quotes the choices, from Python 3.13.1 on it does not
            close = get_close_matches(value, re.findall(r"[\w.-]+", choices or ""), n=1)
            need = _NEEDS.get(kind, "another value")
            problem = f"{name} is {value!r}"
            message = f"{problem}: needs {need}" if choices is None else f"{problem}{choices}"
        change = f"did you mean {close[0]}?" if close else f"see {self.prog} --help"
        raise SettingsError(message, change=change)


def _group_of(cls: type) -> str:
    """ "SamplingParams" is the group "sampling"."""
    words = re.sub("(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower().split()
    return "output" if words[0] in ("run", "chat") else words[0]


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """Build the settings of the engine. Raises SettingsError for invalid values and paths."""
    from offload_rt.weights.locate import check_paths

    config = from_flags(EngineConfig, namespace)
    check_paths(config)
    return config


def from_flags(cls: type[Settings], namespace: argparse.Namespace) -> Settings:
    """Build settings from parsed flags. Raises SettingsError for invalid values."""
    names = [item.name for item in fields(cls)]  # type: ignore[arg-type]  # a dataclass
    values = {name: getattr(namespace, name, None) for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})

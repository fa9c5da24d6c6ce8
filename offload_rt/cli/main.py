"""Console script `offload-rt`: selects the command."""

import sys
import warnings
from importlib import import_module
from typing import NoReturn

from offload_rt import __version__
from offload_rt.cli.process import exit_code, run_program

VERBS = {
    "run": "generate from a model larger than device memory",
    "chat": "chat in the terminal",
    "serve": "serve an OpenAI-compatible API and a web page",
    "plan": "forecast memory and time on any machine from config files",
    "doctor": "check this machine and print how to fix missing parts",
    "convert": "write losslessly encoded weights for later runs",
    "calibrate": "measure a model pair on this machine for later runs",
    "report": "print busy and idle shares of a timeline of `run --trace`",
    "completion": "print a completion script for bash, zsh or tcsh",
}


def main(given: list[str]) -> int:
    """Run a command; returns its exit code."""
    if given and given[0] in VERBS:
        code: int = import_module(f"offload_rt.cli.{given[0]}").main(given[1:])
        return code
    # Imported late: Ctrl-C before `run_program` prints a traceback.
    import argparse
    from importlib.metadata import version
    from platform import python_version

    from offload_rt.cli.flags import Parser

    versions = [f"offload-rt {__version__}", f"Python {python_version()}"]
    versions += [f"{name} {version(name)}" for name in ("torch", "transformers")]
    parser = Parser("offload-rt", "Run language models larger than device memory, exactly.")
    parser.add_argument("--version", action="version", version=", ".join(versions))
    verbs = parser.add_subparsers(
        metavar="COMMAND", required=True, parser_class=argparse.ArgumentParser
    )
    for name, text in VERBS.items():
        verbs.add_parser(name, help=text)
    return exit_code(lambda: parser.parse_args(given or ["--help"]))


def script(*verb: str) -> NoReturn:
    """Run the console script as this process, optionally with a fixed command."""
    # Without the place in the code.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    sys.exit(run_program(lambda: main([*verb, *sys.argv[1:]])))

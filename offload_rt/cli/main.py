"""The console script `offload-rt`: a verb, and the flags of that verb."""

import argparse
import sys
from importlib import import_module
from importlib.metadata import version
from platform import python_version
from typing import NoReturn

from offload_rt import __version__
from offload_rt.cli.flags import Parser
from offload_rt.cli.process import exit_code, run_program

VERBS = {
    "run": "generate from a model larger than the memory of its device",
    "chat": "talk with such a model in the terminal",
    "serve": "serve such a model to OpenAI's clients over HTTP, and a page for people",
    "plan": "predict what a model would take on a machine, from its config alone",
    "convert": "encode the weights of a model without loss, for a faster link in later runs",
    "calibrate": "measure a pair of models on this machine, for later runs",
    "report": "draw the timeline that `offload-rt run --trace` wrote",
}


def main(given: list[str]) -> int:
    """Run a verb; returns its exit code."""
    if given and given[0] in VERBS:
        code: int = import_module(f"offload_rt.cli.{given[0]}").main(given[1:])
        return code
    parser = Parser(
        "offload-rt", "Run a language model larger than the memory of its device, exactly."
    )
    parser.add_argument("--version", action="version", version=_versions())
    verbs = parser.add_subparsers(
        metavar="VERB", required=True, parser_class=argparse.ArgumentParser
    )
    for name, text in VERBS.items():
        verbs.add_parser(name, help=text)
    return exit_code(lambda: parser.parse_args(given))


def _versions() -> str:
    """Versions of offload_rt, Python, torch and transformers, without importing the latter two."""
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([f"offload-rt {__version__}", f"Python {python_version()}", *packages])


def script(*verb: str) -> NoReturn:
    """The console script as the whole of a process, with a verb before the flags it is given."""
    sys.exit(run_program(lambda: main([*verb, *sys.argv[1:]])))

"""Public names and settings change only together with the list tests/public_names.txt."""

import inspect
from dataclasses import fields
from pathlib import Path

import offload_rt
from offload_rt import LLM, Output, Piece, SamplingParams, Stats
from offload_rt.cli.main import VERBS
from offload_rt.config import EngineConfig, flag_of

LIST = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    names = [f"offload_rt.{name}" for name in offload_rt.__all__]
    names += [f"LLM.{name}" for name, _ in inspect.getmembers(LLM) if not name.startswith("_")]
    names += [f"LLM({name}=)" for name in inspect.signature(LLM).parameters]
    for record in (Output, Piece, Stats, SamplingParams):
        names += [f"{record.__name__}.{field.name}" for field in fields(record)]
    names += [f"offload-rt {verb}" for verb in VERBS]
    names += [flag_of(field.name) for field in (*fields(EngineConfig), *fields(SamplingParams))]
    return sorted(set(names))


def test_public_names_equal_the_committed_list():
    """A missing name breaks users. Add new names to the list and both kinds to CHANGELOG.md."""
    assert public_names() == LIST.read_text(encoding="utf-8").split("\n")[:-1]


def test_arguments_of_llm_are_the_engine_settings():
    arguments = set(inspect.signature(LLM).parameters) - {"use_tqdm_on_load"}
    assert arguments == {field.name for field in fields(EngineConfig)}

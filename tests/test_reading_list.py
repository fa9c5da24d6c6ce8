"""docs/architecture.md lists the files that a pass executes, in reading order."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
from support.tiny import keep_steady

import offload_rt
from offload_rt import LLM, SamplingParams
from offload_rt.config import EngineConfig
from offload_rt.ops import cpu

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(offload_rt.__file__).parent
CORE_FILES = 25
CORE_LINES = 6000
# Executed if accepted rows move in the cache, which depends on the tree.
MOVING = {"ops/extension.py", "ops/reference.py"}


def test_reading_list_names_the_files_of_a_plain_and_of_a_speculative_pass(monkeypatch):
    if cpu.library() is None:
        pytest.skip("torch computes the layers")
    paths: set[Path] = set()

    def record(frame: FrameType, event: str, _: object) -> None:
        if is_recording and event == "call":
            paths.add(Path(frame.f_code.co_filename))

    is_recording = False
    threading.setprofile(record)
    target = ROOT / "models" / "demo-target"
    draft = str(ROOT / "models" / "demo-draft")
    params = SamplingParams(max_tokens=6, temperature=0.0)
    for settings in (
        {"drafter": "none", "device_memory": "11.5MB"},
        {"draft_model": draft, "device_memory": "15MB"},
    ):
        with LLM.from_config(EngineConfig(str(target), **settings)) as llm:
            assert llm.plan.streamed_nbytes
            llm.generate("import sys", params)  # fills tables and caches
            is_recording = True
            sys.setprofile(record)
            llm.generate("import os", params)
            sys.setprofile(None)
            is_recording = False
        keep_steady(monkeypatch)  # drafting pays
    threading.setprofile(None)
    files = {str(path.relative_to(PACKAGE)) for path in paths if PACKAGE in path.parents}
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = text.split("### Reading list")[1].split("\n#")[0]
    core = re.findall(r"^\d+\. `(.+?)`", section, re.MULTILINE)
    helpers = re.findall(r"`(.+?)`", section.partition("They call ")[2])
    listed = {f"{name}.py" for name in (*core, *helpers)}
    missing, extra = sorted(files - listed - MOVING), sorted(listed - files)
    assert not missing and not extra, f"{missing} {extra}"
    n_lines = sum(len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in core)
    assert len(core) <= CORE_FILES and n_lines <= CORE_LINES

"""Commands of the documentation: CI runs the marked blocks, all others have valid flags."""

import re
import shlex
from importlib import import_module
from pathlib import Path

from run_readme import ROOT, blocks
from settings_page import PAGE, page

from offload_rt.cli.flags import GROUP_OF_FIELD
from offload_rt.cli.main import VERBS
from offload_rt.config import EngineConfig

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_marked_blocks_are_found_in_their_order():
    text = "```sh runnable\na\nb\n```\ntext\n```\nno\n```\n```python runnable\nc\n```\n"
    assert blocks(text) == [("sh", "a\nb\n"), ("python", "c\n")]
    commands = "".join(content for _, content in blocks((ROOT / "README.md").read_text()))
    for command in ("pip install .", "make run", "make test", "offload-rt doctor", "llm.generate"):
        assert command in commands


def commands(page: Path) -> list[list[str]]:
    """Arguments of all commands of offload-rt in the code blocks of a page."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    code = "\n".join(re.findall(r"^```(?:sh|sh runnable)?\n(.*?)^```$", text, re.M | re.S))
    lines = re.findall(r"^(?:\$ )?offload-rt (.*)$", code, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_commands_of_the_documentation_have_valid_flags():
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 10
    for verb, *arguments in found:
        assert verb in VERBS
        import_module(f"offload_rt.cli.{verb}").new_parser().parse_args(arguments)


def test_settings_page_is_up_to_date():
    """After a change of settings run `python scripts/settings_page.py`."""
    assert PAGE.read_text(encoding="utf-8") == page()
    assert set(GROUP_OF_FIELD) == set(EngineConfig.__dataclass_fields__)

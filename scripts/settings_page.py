"""Write docs/reference/settings.md from the settings classes: `python scripts/settings_page.py`."""

from dataclasses import MISSING, fields
from pathlib import Path

from offload_rt.cli.calibrate import CalibrateSettings
from offload_rt.cli.chat import ChatSettings
from offload_rt.cli.convert import ConvertSettings
from offload_rt.cli.flags import GROUP_OF_FIELD
from offload_rt.cli.plan_settings import PlanSettings
from offload_rt.cli.run import RunSettings, TemplateSettings
from offload_rt.config import EngineConfig, flag_of
from offload_rt.sampling_params import SamplingParams
from offload_rt.server.settings import ServeSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "settings.md"
_HEAD = """# Settings

`python scripts/settings_page.py` writes this page from the code.
Python arguments have the names of the flags, with underscores.
"""
_SECTIONS = {
    "Sampling (`SamplingParams`)": SamplingParams,
    "Chat template": TemplateSettings,
    "`offload-rt run`": RunSettings,
    "`offload-rt chat`": ChatSettings,
    "`offload-rt serve`": ServeSettings,
    "`offload-rt plan`": PlanSettings,
    "`offload-rt convert`": ConvertSettings,
    "`offload-rt calibrate`": CalibrateSettings,
}


def page() -> str:
    """Return the page: one table per group of settings."""
    groups = dict.fromkeys(GROUP_OF_FIELD.values())
    sections = {
        f"Engine: {group} (`EngineConfig`)": [
            item for item in fields(EngineConfig) if GROUP_OF_FIELD[item.name] == group
        ]
        for group in groups
    }
    sections |= {title: list(fields(cls)) for title, cls in _SECTIONS.items()}
    parts = [_HEAD]
    for title, items in sections.items():
        parts.append(f"\n## {title}\n\n| flag | default | meaning |\n|---|---|---|\n")
        # Fields without a flag have no help.
        for item in (item for item in items if "help" in item.metadata):
            is_shown = item.default not in (None, MISSING, (), "") and item.default is not False
            default = f"`{item.default}`" if is_shown else ""
            text = item.metadata["help"].replace("|", "\\|").replace("<", "&lt;")
            choices = ", ".join(f"`{choice}`" for choice in item.metadata["choices"])
            text += f" ({choices})" if choices else ""
            parts.append(f"| `{flag_of(item.name)}` | {default} | {text} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

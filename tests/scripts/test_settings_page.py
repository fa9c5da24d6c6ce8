"""The settings page is the one that the code generates."""

from settings_page import PAGE, page

from offload_rt.cli.flags import GROUP_OF_FIELD
from offload_rt.config import EngineConfig


def test_settings_page_is_up_to_date():
    """After a change of settings run `python scripts/settings_page.py`."""
    assert PAGE.read_text(encoding="utf-8") == page()
    assert set(GROUP_OF_FIELD) == set(EngineConfig.__dataclass_fields__)

"""Shapes of well-known models, for planning without access to a hub.

Sizes are from the published config.json; for multimodal models, from the text model's. A test
compares the resulting weight counts with the published counts.
"""

import json
from pathlib import Path
from typing import Any

KNOWN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)

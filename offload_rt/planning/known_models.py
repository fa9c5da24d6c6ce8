"""The shapes of well-known models, for planning where no hub is at hand.

What their published config.json says of sizes, of multimodal models that of the text model. A test
compares the weights that follow with what their authors count.
"""

import json
from pathlib import Path
from typing import Any

KNOWN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)

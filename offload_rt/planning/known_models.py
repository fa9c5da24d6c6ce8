"""Shapes of well-known models, for planning without access to a hub.

Sizes are from the published config.json; for multimodal models, from the text model's. A test
compares the resulting weight counts with the published counts.
"""

import json
import re
from pathlib import Path
from typing import Any

KNOWN: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("known_models.json").read_text(encoding="utf-8")
)
# Publishers of the models on the hub. Other repositories may contain changed shapes.
_PUBLISHERS = {
    "meta-llama", "qwen", "google", "mistralai", "microsoft", "openai", "zai-org", "thudm",
    "deepseek-ai", "moonshotai", "tinyllama", "princeton-nlp", "jackfram", "lmsys",
}  # fmt: skip
# Parts of hub ids that do not change the shape.
_VARIANT = re.compile(r"-(instruct|chat|hf|it|pt|base|0414|v[01]\.\d)(?=-|$)")
_RENAMED = {
    "mistralsmall24b2501": "mistral-small-3",
    "mistralsmall3.124b2503": "mistral-small-3.1",
    "deepseekr1": "deepseek-v3",
    "llama4scout17b16e": "llama4-scout",
    "llama4maverick17b128e": "llama4-maverick",
}
_BY_PLAIN_NAME = {name.replace("-", ""): name for name in KNOWN} | _RENAMED


def known_name(model: str) -> str | None:
    """Return the built-in shape of a built-in name or a publisher's hub id, or None."""
    lower = model.lower()
    publisher, _, name = lower.rpartition("/")
    if publisher not in _PUBLISHERS:
        return lower if lower in KNOWN else None
    plain = _VARIANT.sub("", name).removeprefix("meta-").replace("-", "")
    return _BY_PLAIN_NAME.get(plain)


def has_no_weights(*models: str | None) -> bool:
    """Return whether a model is the name of a built-in shape."""
    return any(model is not None and model.lower() in KNOWN for model in models)

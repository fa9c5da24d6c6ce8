"""Models of the examples: SmolLM2-135M-Instruct after `make run`, else the demo pair."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "models"
# Unquantised, so that transformers reads it as well; `make run` writes it.
REAL = ROOT / "demo-cache/SmolLM2-135M-Instruct"
IS_REAL = (REAL / "model.safetensors").exists()
TARGET = str(REAL if IS_REAL else MODELS / "demo-target")
DRAFT = str(MODELS / ("smollm2-eagle3" if IS_REAL else "demo-draft"))
# The demo pair has no chat template of its own.
CHAT_TEMPLATE = None if IS_REAL else (MODELS / "chat.jinja").read_text(encoding="utf-8")

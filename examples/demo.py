"""Paths of the demo pair, shared by the examples."""

from pathlib import Path

MODELS = Path(__file__).resolve().parents[1] / "models"
TARGET = str(MODELS / "demo-target")
DRAFT = str(MODELS / "demo-draft")

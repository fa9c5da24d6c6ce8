"""Speculation: speedup, systems, verification, predictions, learning, long texts."""

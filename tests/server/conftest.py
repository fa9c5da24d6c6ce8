"""Fixtures of servers: the demonstration models, and a tiny model that reads images."""

from support.serving import llm, served, vision

__all__ = ["llm", "served", "vision"]

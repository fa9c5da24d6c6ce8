"""Formats of tool calls, a file per format; the folder is the registry of `--tool-call-parser`."""

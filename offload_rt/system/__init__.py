"""The machine, files, the timeline, the registry."""

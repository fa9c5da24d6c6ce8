"""The machine, threads, files, the timeline, the registry."""

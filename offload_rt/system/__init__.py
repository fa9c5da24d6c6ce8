"""Machine profile, processes and ranks, files, timeline, registry."""

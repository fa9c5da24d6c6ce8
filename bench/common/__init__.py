"""Shared parts of all benchmarks: measuring, recording, pacing, processes, checkpoints."""

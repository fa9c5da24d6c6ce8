"""Benchmarks: one file per question, each with the physical floor measured in the same run."""

"""Benchmarks by topic. Each prints question, machine, physical floor and a JSON line."""

"""Comparison with other systems: contract, floors, result tables, chart."""

"""Speculative decoding: drafters propose token trees, verification rules accept paths."""

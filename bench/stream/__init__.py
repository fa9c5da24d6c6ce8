"""Streamed passes: floors, memory, overlap, lossless weights, long contexts, tracing."""

"""Speculative decoding: who proposes trees, and how they are verified."""

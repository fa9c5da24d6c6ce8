"""Execution on several ranks: sharded weights, tensor-parallel and pipeline models."""

"""Model families, the transformers adapter, draft heads, sharded models."""

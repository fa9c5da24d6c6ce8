"""Model types of transformers: equality with `generate`, and cost against native decoders."""

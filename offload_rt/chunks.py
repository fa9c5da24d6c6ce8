"""Rows and scores that are computed together; they bound the memory of activations."""

# Rows that go through a layer together. One pass over the weights serves a long prompt chunk by chunk.
CHUNK_ROWS = 512
# Attention scores, or entries of a mask, in memory at once where no kernel serves: 32 MiB with copies.
MOST_SCORES = 2 << 20

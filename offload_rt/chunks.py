"""Rows and scores that are computed together; they bound the memory of activations."""

# Rows that go through a layer together. One pass over the weights serves a long prompt chunk by
# chunk.
CHUNK_ROWS = 512
# Attention scores, or entries of a mask, in memory at once where no kernel serves: 32 MiB with
# copies.
MOST_SCORES = 2 << 20

# Rows and keys are rounded up to these, so that few shapes are captured: a level of 5 rows is
# computed as 8.
GRAPH_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def most_captured_rows(n_rows: int) -> int:
    """Return the rows of the widest captured pass, for passes of up to `n_rows`."""
    return max(width for width in GRAPH_WIDTHS if width <= max(n_rows, 1))

"""Rows and scores per kernel call, which bound the memory of activations."""

# Rows per layer call. A single pass over the weights serves all chunks of a long prompt.
CHUNK_ROWS = 512
# Attention scores or mask entries in memory without a kernel: 32 MiB with copies.
MAX_SCORES = 2 << 20

# Rows and keys are rounded up to these widths to capture few shapes: 5 rows are computed as 8.
GRAPH_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def max_captured_rows(n_rows: int) -> int:
    """Return the rows of the widest captured pass, for passes of up to `n_rows`."""
    return max(width for width in GRAPH_WIDTHS if width <= max(n_rows, 1))

"""Cache rows of drafts."""

# Rows computed for each node of the final tree: a growing tree drops nodes for better ones.
ROWS_PER_NODE = 2
# Bytes of float32 logits that a grammar or noise changes at once.
_CHANGED_NBYTES = 4 << 20


def changed_rows(vocab_size: int) -> int:
    """Rows of a draft's logits that a grammar or noise changes at once, which bounds memory."""
    return max(_CHANGED_NBYTES // (4 * vocab_size), 1)


def draft_rows(longest: int, n_nodes: int) -> int:
    """Rows of the draft's cache for up to `longest` tokens and trees of up to `n_nodes`."""
    return longest - 1 + ROWS_PER_NODE * n_nodes


def view_rows(budget: int, n_nodes: int) -> int:
    """Rows of a view for drafts of trees of up to `n_nodes`."""
    return budget + ROWS_PER_NODE * n_nodes + 1

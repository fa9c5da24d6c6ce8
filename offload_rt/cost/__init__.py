"""Cost model: seconds of passes from bytes, FLOPs and rows, and the tree size that follows."""

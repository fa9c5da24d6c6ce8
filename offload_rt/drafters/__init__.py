"""Who drafts the tree: one file each."""

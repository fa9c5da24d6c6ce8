"""Token trees: topology, search, tree size selection."""

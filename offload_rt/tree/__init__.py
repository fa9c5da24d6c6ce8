"""Trees of drafted tokens."""

"""How weights are stored and used: one file for each format."""

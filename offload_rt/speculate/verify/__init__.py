"""How a tree is verified: one file for each rule."""

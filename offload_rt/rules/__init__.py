"""How a drafted tree is verified: one file for each rule."""

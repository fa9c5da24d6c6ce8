"""Who proposes trees: one file for each drafter."""

"""Products and attention of a CPU against its measured ceilings."""

"""Forward passes: runner, CUDA graphs, sequences, pass costs."""

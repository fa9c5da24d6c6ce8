"""One model, one pass: the runner, CUDA graphs, the sequence, the cost of a pass."""

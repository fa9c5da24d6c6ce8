"""What a model would do on a machine that is not at hand."""

"""Notes how large the numbers of each layer are over a run, and where they began to grow."""

"""Step time, overhead and memory, side by side with what torch itself has: `python -m benchmarks`."""

"""What a sweep measured, as values, and the files that keep it."""

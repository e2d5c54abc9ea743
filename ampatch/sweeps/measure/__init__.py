"""What is measured inside a run, and under which conditions."""

"""What is made of the records: rows, distances, verdicts, and what got worse."""

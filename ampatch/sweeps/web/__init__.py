"""The page of a sweep: one HTML file that opens without a network."""

"""The page of a report: one HTML file that opens without a network."""

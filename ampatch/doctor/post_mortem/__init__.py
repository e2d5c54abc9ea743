"""What `ampatch doctor --open` shows of a file that training left when it broke."""

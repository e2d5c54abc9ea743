"""Misuse: what trains wrongly without an error is warned of once, at the line to change."""

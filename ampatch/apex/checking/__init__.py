"""Reads scripts: which names of apex they use, whether these are provided, and what else breaks today."""

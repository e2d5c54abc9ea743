"""Looks in the first steps for what keeps mixed precision from being faster."""

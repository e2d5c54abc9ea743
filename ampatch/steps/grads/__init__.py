"""Gradients of a step: earlier ones beside new ones, ranks' own ones, and those that no block names."""

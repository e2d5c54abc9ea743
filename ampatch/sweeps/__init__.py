"""Trains one script at several opt levels, a fresh process each, and compares what came out."""

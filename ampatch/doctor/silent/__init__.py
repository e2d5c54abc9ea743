"""Finds faults that skip no step: what half loses without a sign, and scales that are applied wrongly."""

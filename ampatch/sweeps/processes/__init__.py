"""The processes of a sweep: one run each, fresh, watched and stopped.

Imports `sweeps.records`, `sweeps.measure` and what runs scripts.
"""

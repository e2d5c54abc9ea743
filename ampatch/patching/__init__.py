"""Binds casts to torch's functions, with an exact way back.

Imports `casts` and `levels`.
"""

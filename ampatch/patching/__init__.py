"""Binds casts to torch's functions, with an exact way back, and has torch's features work with them.

Imports `casts` and `levels`.
"""

"""Warnings at lines of a script that train wrongly without an error.

Imports `patching`, `steps` and `levels`.
"""

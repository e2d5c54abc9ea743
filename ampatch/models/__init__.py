"""The half model of O2, O3 and O5: which modules are cast, the hooks that do it, one float32 value a weight.

Imports `casts`, `steps` (for the masters) and `levels`.
"""

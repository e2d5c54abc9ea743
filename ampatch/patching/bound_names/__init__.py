"""Names that a script bound to a function of torch before it was patched, as `from torch import mm` does.

Imports no other room but `levels`.
"""

"""Tensors in, tensors out: cast tables, what may be cast, wrappers, kept casts, and what to say of an op.

Imports `levels` and the rows of `lists`.
"""

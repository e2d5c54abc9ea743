"""What trainers imported from the inside of apex's `initialize`: a function over all tensors of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor


def applier(value: object, fn: Callable[[object], object]) -> object:
    """Applies a function to the tensors of a batch, and to objects with a method `to`; containers stay."""
    if isinstance(value, Tensor) or (hasattr(value, "to") and not isinstance(value, type)):
        return fn(value)
    if isinstance(value, Mapping):
        return type(value)((key, applier(item, fn)) for key, item in value.items())  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(applier(item, fn) for item in value)
    if isinstance(value, (list, tuple, set)):
        return type(value)(applier(item, fn) for item in value)
    return value

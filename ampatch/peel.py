"""What stands behind the wrappers that ampatch puts around functions."""

from __future__ import annotations

import types
from collections.abc import Callable


def peel(function: Callable) -> Callable:
    """Returns a function without the wrappers that ampatch has put around it; others stay.

    >>> import ampatch as amp
    >>> peel(amp.half_function(len)) is len
    True
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(peel(function.__func__), function.__self__)
    while hasattr(function, "__wrapped__") and _is_ours(function):
        function = function.__wrapped__
    return function


def _is_ours(function: Callable) -> bool:
    return getattr(function, "__globals__", {}).get("__name__", "").startswith("ampatch.")

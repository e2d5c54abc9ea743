"""What stands behind wrappers: those that ampatch puts around functions, and those of optimizers."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator

from torch.optim import Optimizer


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


def list_wrapped(given: object) -> Iterator[object]:
    """Yields a wrapper such as LARC or Lookahead, what it keeps, and so on to the innermost optimizer."""
    while given is not None:
        yield given
        given = _look_inside(given)


def _look_inside(wrapper: object) -> object:
    """Returns what a wrapper keeps as `optim` or `optimizer`, else the optimizer among its attributes."""
    named = getattr(wrapper, "optim", None) or getattr(wrapper, "optimizer", None)
    kept = vars(wrapper).values() if hasattr(wrapper, "__dict__") else ()
    return named or next((value for value in kept if isinstance(value, Optimizer)), None)

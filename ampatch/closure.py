"""The closure that a script hands to `optimizer.step`."""

from __future__ import annotations

from collections.abc import Callable


def find_closure(args: tuple, kwargs: dict) -> tuple[Callable | None, Callable]:
    """Returns the closure among the arguments of `step`, and how to put another in its place.

    Hooks of `step` see the optimizer itself as the first argument.
    """
    if kwargs.get("closure") is not None:
        return kwargs["closure"], lambda new: (args, {**kwargs, "closure": new})
    if len(args) > 1 and callable(args[1]):
        return args[1], lambda new: ((args[0], new, *args[2:]), kwargs)
    return None, lambda new: (args, kwargs)

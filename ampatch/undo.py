"""The way back for objects that a script may drop: these own their records, and we only refer to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Returns what calls a method if its object is still alive, and does nothing once it is gone."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


def refer(thing: object) -> Callable[[], object]:
    """Returns a weak reference, or a strong one to what takes none, as a wrapper with `__slots__`."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing

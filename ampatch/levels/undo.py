"""The way back for objects that a script may drop: these own their records, and we only refer to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack


def weakly(method: Callable[..., None], *objects: object) -> Callable[[], None]:
    """Returns what calls a class's method on the objects that are still alive by then, the last first."""
    references = [weakref.ref(one) for one in objects]

    def call() -> None:
        with ExitStack() as stack:
            for alive in [reference() for reference in references]:
                if alive is not None:
                    stack.callback(method, alive)

    return call


def refer(value: object) -> Callable[[], object]:
    """Returns a weak reference, or a strong one to what takes none, as a wrapper with `__slots__`."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value

"""Replaces two functions of torch where there are no hooks, with a way back in any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack


def replace(owner: type, name: str, wrapper: Callable[..., object], undo: ExitStack) -> None:
    """Has `wrapper(original, *args, **kwargs)` run in the place of a method, until undone.

    Watches may end in any order: one that is not the outermost is taken out of the chain.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def replaced(*args: object, **kwargs: object) -> object:
        return wrapper(replaced.inner, *args, **kwargs)  # type: ignore[attr-defined]

    replaced.inner = original  # type: ignore[attr-defined]
    setattr(owner, name, replaced)
    undo.callback(_take_out, owner, name, replaced)


def _take_out(owner: type, name: str, replaced: Callable[..., object]) -> None:
    outer = vars(owner)[name]
    if outer is replaced:
        setattr(owner, name, replaced.inner)  # type: ignore[attr-defined]
        return
    while getattr(outer, "inner", None) not in (None, replaced):
        outer = outer.inner
    if hasattr(outer, "inner"):
        outer.inner = replaced.inner  # type: ignore[attr-defined]

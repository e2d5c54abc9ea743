"""Where a function is looked up, however often it is replaced there."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from ampatch.casts.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Place:
    """Finds a function again whenever it is asked, since a session replaces it where it is looked up."""

    name: str
    find: Callable[[], Callable]


def locate(function: Callable | str) -> Place:
    """Returns the place of a function, or of a dotted path; itself if it is at none."""
    path = function if isinstance(function, str) else _path_of(function)
    if path is None:
        return Place(getattr(function, "__qualname__", repr(function)), lambda: function)
    return Place(path, functools.partial(pkgutil.resolve_name, path))


def _path_of(function: Callable) -> str | None:
    """The path that a function says to have, if that is true; torch's own are known better."""
    module = getattr(function, "__module__", None) or "torch"
    if module.partition(".")[0] == "torch":
        return Catalog().find(function)
    path = f"{module}.{getattr(function, '__qualname__', None)}"
    try:
        return path if pkgutil.resolve_name(path) is function else None
    except (ImportError, AttributeError, ValueError):
        return None

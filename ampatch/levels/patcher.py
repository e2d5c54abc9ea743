"""Replaces attributes of what others have made, once or for a session, and puts back what was there."""

from __future__ import annotations

import ctypes
import gc
from contextlib import ExitStack
from dataclasses import dataclass

from ampatch.errors import PatchConflictError

_ABSENT = object()
_MADE_BY_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE, of a class's `__flags__`


@dataclass(frozen=True, slots=True)
class Patch:
    """One replaced attribute, and what it takes to put it back."""

    parent: object
    attribute: str
    previous: object  # what vars(parent) held; _ABSENT where it was inherited or provided otherwise
    replacement: object
    original: object  # what a look-up found, inherited or not; _ABSENT where nobody looked


class Patcher:
    """Replaces attributes, and undoes it last-in first-out."""

    def __init__(self) -> None:
        self._patches: list[Patch] = []
        self._originals: dict[tuple[int, str], object] = {}  # by id of the parent, and attribute

    def __len__(self) -> int:
        return len(self._patches)

    def replace(self, parent: object, attribute: str, replacement: object) -> None:
        """Sets an attribute of a module, a class or an instance, and remembers what was there.

        "It was not there" is a state to restore: most Tensor methods are inherited, and a class is
        read through its `__dict__`, where `getattr` would bind a method or unwrap a staticmethod.
        Raises AttributeError for one that is not there at all.
        """
        original = get_raw(parent, attribute)
        self.put(parent, attribute, replacement, original)
        self._originals.setdefault((id(parent), attribute), original)

    def put(self, parent: object, attribute: str, value: object, original: object = _ABSENT) -> None:
        """Sets an attribute, whether it is there or not; `original` is what a look-up finds now."""
        previous = vars(parent).get(attribute, _ABSENT)
        _assign(parent, attribute, value)
        self._patches.append(Patch(parent, attribute, previous, value, original))

    def find_original(self, parent: object, attribute: str) -> object:
        """Returns what an attribute was before any patch of ours, raw."""
        place = id(parent), attribute
        return self._originals[place] if place in self._originals else get_raw(parent, attribute)

    def close(self) -> None:
        """Undoes every replacement.

        Raises PatchConflictError, after the others are undone, for attributes that somebody else
        has replaced since; theirs stay, and `retry` undoes ours when theirs are gone.
        """
        taken = [".".join(filter(None, qualify(patch.parent, patch.attribute))) for patch in self.retry()]
        if taken:
            places = ", ".join(dict.fromkeys(taken))
            raise PatchConflictError(
                f"{places}: replaced by other code after ampatch had patched it, and left as it is; "
                f"undo that patch, then call ampatch.uninitialize() again"
            )

    def retry(self) -> list[Patch]:
        """Undoes what can be undone, and returns what others have replaced."""
        taken = []
        for patch in reversed(self._patches):
            current = vars(patch.parent).get(patch.attribute, _ABSENT)
            if current is patch.previous:  # somebody has put that back
                continue
            if (
                current is patch.replacement or current is patch.original
            ):  # which a patch over ours may hold by now
                _assign(patch.parent, patch.attribute, patch.previous)
            else:
                taken.append(patch)
        self._patches = taken[::-1]
        self._originals = {(id(patch.parent), patch.attribute): patch.original for patch in taken}
        return taken


def _assign(parent: object, attribute: str, value: object) -> None:
    """Sets or deletes an attribute; a class that was written in C takes it in its dictionary alone."""
    try:
        delattr(parent, attribute) if value is _ABSENT else setattr(parent, attribute, value)
    except TypeError:
        if not isinstance(parent, type) or parent.__flags__ & _MADE_BY_PYTHON:
            raise
        (attributes,) = gc.get_referents(vars(parent))
        attributes.pop(attribute) if value is _ABSENT else attributes.update({attribute: value})
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(parent))


class SessionPatch:
    """What is patched once a session; what others keep from being undone is undone later. A base class."""

    def __init__(self) -> None:
        self._patcher: Patcher | None = None
        self.is_open = False
        self._blocked: list[Patcher] = []  # what others had patched over when we closed

    def patch(self, patcher: Patcher) -> None:
        """Replaces what is to be replaced."""

    def forget(self) -> None:
        """Drops what was remembered for the patches."""

    def open(self, undo: ExitStack) -> None:
        if self._patcher is None:
            self.patch(self._begin(undo))

    def _begin(self, undo: ExitStack) -> Patcher:
        """Returns what replaces attributes; `undo` receives the way back."""
        self._patcher, self.is_open = Patcher(), True
        undo.callback(self._close)
        return self._patcher

    def _close(self) -> None:
        patcher, self._patcher, self.is_open = self._patcher, None, False
        self._blocked.append(patcher)  # first: Ctrl-C may end what follows
        self.forget()
        patcher.close()

    def retry(self) -> None:
        """Undoes what somebody else's patch kept from being undone, where that is gone by now."""
        self._blocked = [patcher for patcher in reversed(self._blocked) if patcher.retry()][::-1]


def get_raw(parent: object, attribute: str) -> object:
    """Looks an attribute up without binding it: in the `__dict__` of a class and its bases."""
    if isinstance(parent, type):
        for base in parent.__mro__:
            if attribute in vars(base):
                return vars(base)[attribute]
    return getattr(parent, attribute)


def qualify(parent: object, attribute: str) -> tuple[str | None, str]:
    """Returns the module and the qualified name of an attribute, by which functions pickle."""
    if isinstance(parent, type):
        return parent.__module__, f"{parent.__qualname__}.{attribute}"
    name = getattr(parent, "__name__", None)
    return (
        (name, attribute) if name else (type(parent).__module__, f"{type(parent).__qualname__}.{attribute}")
    )

"""Places that hold one object: an entry, an attribute, a part of a partial; and what was put there."""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import Protocol

_ABSENT = object()


class Slot(Protocol):
    """A place that holds one object."""

    def get(self) -> object:
        """Returns what is there."""

    def set(self, value: object) -> None:
        """Puts something else there."""


@dataclass(frozen=True, slots=True)
class Item:
    """An entry of a dictionary, or of a list."""

    container: dict | list | deque
    key: object

    def get(self) -> object:
        """Returns the entry, or a mark that nothing else is if it is gone."""
        if isinstance(self.container, dict):
            return dict.get(self.container, self.key, _ABSENT)  # past what a defaultdict would make
        try:
            return self.container[self.key]  # type: ignore[index]
        except IndexError:
            return _ABSENT

    def set(self, value: object) -> None:
        """Replaces the entry."""
        self.container[self.key] = value  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a class, a function, a closure's cell or an object with `__slots__`."""

    owner: object
    name: str

    def get(self) -> object:
        """Returns the attribute raw: that of a class is not bound."""
        if isinstance(self.owner, type):
            return vars(self.owner).get(self.name, _ABSENT)
        try:
            return object.__getattribute__(self.owner, self.name)
        except (AttributeError, ValueError):  # a slot or a cell that is empty
            return _ABSENT

    def set(self, value: object) -> None:
        """Replaces the attribute.

        Access through an instance binds a Python function, which it does not do with the builtin
        whose place it takes.
        """
        if not isinstance(self.owner, type):
            object.__setattr__(self.owner, self.name, value)  # past what a frozen dataclass refuses
            return
        if not hasattr(self.get(), "__get__") and hasattr(value, "__get__"):
            value = staticmethod(value)  # type: ignore[arg-type]
        setattr(self.owner, self.name, value)


@dataclass(frozen=True, slots=True)
class PartialPart:
    """The function or the positional arguments of a `functools.partial`."""

    partial: functools.partial
    name: str

    def get(self) -> object:
        """Returns it."""
        return getattr(self.partial, self.name)

    def set(self, value: object) -> None:
        """Replaces it, in the same object, which others may hold."""
        partial = self.partial
        parts = {"func": partial.func, "args": partial.args, self.name: value}
        partial.__setstate__((parts["func"], parts["args"], partial.keywords, vars(partial) or None))


@dataclass(frozen=True, slots=True)
class Change:
    """What was put into a slot, and what had been there."""

    slot: Slot
    previous: object
    replacement: object

    def revert(self) -> None:
        """Puts back what had been there, unless somebody has put something else there since."""
        if self.slot.get() is self.replacement:
            self.slot.set(self.previous)

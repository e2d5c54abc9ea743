"""What was changed in a program to give it apex, and the way back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType

ABSENT = object()


class Changes(ExitStack):
    """Changes made one after the other; closing undoes them last to first.

    What somebody else has changed since stays as it is.
    """

    def add_module(self, name: str, module: ModuleType) -> None:
        """Gives a module a name in `sys.modules`, which nobody has but a module that is being imported."""
        sys.modules[name] = module
        self.callback(remove_module, name, module)

    def set_attribute(self, owner: object, name: str, value: object) -> None:
        """Sets an attribute of a module or an object."""
        before = vars(owner).get(name, ABSENT)
        setattr(owner, name, value)
        self.callback(restore_attribute, owner, name, value, before)

    def set_class(self, module: ModuleType, cls: type[ModuleType]) -> None:
        """Gives a plain module a class of its own; one that has such a class keeps it."""
        if type(module) is ModuleType:
            module.__class__ = cls
            self.callback(setattr, module, "__class__", ModuleType)


def remove_module(name: str, module: ModuleType) -> None:
    """Takes a name in `sys.modules` back."""
    if sys.modules.get(name) is module:
        del sys.modules[name]


def restore_attribute(owner: object, name: str, value: object, before: object) -> None:
    """Takes an attribute back."""
    if vars(owner).get(name, ABSENT) is not value:
        return
    if before is ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def wrap(function: Callable, replacement: Callable, *given: object) -> Callable:
    """Returns a function whose calls go to `replacement`, with the function and what is given first."""

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        return replacement(function, *given, *args, **kwargs)

    return wrapped

"""What was changed in a program to give it apex, and the way back."""

from __future__ import annotations

import ctypes
import functools
import gc
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
        assign(owner, name, value)
        self.callback(restore_attribute, owner, name, value, before)

    def set_class(self, module: ModuleType, cls: type[ModuleType]) -> None:
        """Gives a plain module a class of its own; one that has such a class keeps it."""
        if type(module) is ModuleType:
            module.__class__ = cls
            self.callback(setattr, module, "__class__", ModuleType)


def assign(owner: object, name: str, value: object) -> None:
    """Sets an attribute, or deletes it; a class that was written in C takes it in its dictionary alone."""
    try:
        delattr(owner, name) if value is ABSENT else setattr(owner, name, value)
    except TypeError:
        (attributes,) = gc.get_referents(vars(owner))
        attributes.pop(name) if value is ABSENT else attributes.update({name: value})
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(owner))


def remove_module(name: str, module: ModuleType) -> None:
    """Takes a name in `sys.modules` back."""
    if sys.modules.get(name) is module:
        del sys.modules[name]


def restore_attribute(owner: object, name: str, value: object, before: object) -> None:
    """Takes an attribute back."""
    if vars(owner).get(name, ABSENT) is value:
        assign(owner, name, before)


def wrap(function: Callable, replacement: Callable, *given: object) -> Callable:
    """Returns a function whose calls go to `replacement`, with the function and what is given first."""

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        return replacement(function, *given, *args, **kwargs)

    return wrapped

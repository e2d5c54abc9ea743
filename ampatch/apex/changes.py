"""What was changed in a program to give it apex, and the way back."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType, ModuleType

import torch

import ampatch
from ampatch.levels.patcher import Patcher

OURS = os.path.dirname(ampatch.__file__)
LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib"))
# Files between the script's line and a function that looks for it.
PASSED = (
    os.path.dirname(torch.__file__),
    OURS,
    "<frozen importlib",
    warnings.__file__,
    argparse.__file__,
)


class ProgramChanges(ExitStack):
    """Changes made one after the other; closing undoes them last to first.

    Attributes are a `Patcher`'s. The rest is what it does not know: names of modules, which stand in a
    dictionary, and classes of modules. What somebody else has changed since stays as it is.
    """

    def __init__(self) -> None:
        super().__init__()
        self._patcher = Patcher()
        self.callback(self._patcher.retry)

    def set_attribute(self, owner: object, name: str, value: object) -> None:
        self._patcher.put(owner, name, value)

    def add_module(self, name: str, module: ModuleType) -> None:
        """Gives a module a name in `sys.modules`; at most a module that is being imported has it yet."""
        sys.modules[name] = module
        self.callback(remove_module, name, module)

    def set_class(self, module: ModuleType, cls: type[ModuleType]) -> None:
        """Gives a plain module a class of its own; one that has such a class keeps it."""
        if type(module) is ModuleType:
            module.__class__ = cls
            self.callback(setattr, module, "__class__", ModuleType)

    def show_warnings_in_script(self) -> None:
        """Has a warning about a line of ours, which calls torch, name the line of the script instead."""
        self.set_attribute(warnings, "showwarning", wrap(warnings.showwarning, show_in_script))


def remove_module(name: str, module: ModuleType) -> None:
    if sys.modules.get(name) is module:
        del sys.modules[name]


def wrap(function: Callable, replacement: Callable, *leading: object) -> Callable:
    """Returns a function whose calls go to `replacement`, with the function and what is given first."""

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        return replacement(function, *leading, *args, **kwargs)

    return wrapped


def is_library(file: str) -> bool:
    """Whether a file is Python's or an installed package's, of this environment or of one below it."""
    is_installed = f"site-packages{os.sep}" in file or f"dist-packages{os.sep}" in file
    return is_installed or file.startswith(LIBRARIES)


def script_frame() -> FrameType | None:
    """Returns the frame of the line that called torch or us."""
    frame = sys._getframe(1)
    while frame and frame.f_code.co_filename.startswith(PASSED):
        frame = frame.f_back
    return frame


def show_in_script(
    show: Callable, /, message: object, kind: type, path: str, line: int, *args: object
) -> None:
    """Shows a warning; one about a line of ours names the line of the script that led there."""
    frame = script_frame() if path.startswith(OURS) else None
    if frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
    show(message, kind, path, line, *args)

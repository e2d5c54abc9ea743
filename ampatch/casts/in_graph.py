"""Calls that stay uncast where torch.compile puts them into a graph."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch

from ampatch.casts.cast import CASTS

Function = Callable[..., object]


def call_uncast(name: str, *args: object, **kwargs: object) -> object:
    """Calls a function of torch with casts off; what a compiled graph holds for such a call."""
    with CASTS.thread.disabled():
        return operator.attrgetter(name)(torch)(*args, **kwargs)


def keep_uncast(original: Function, place: tuple[str | None, str]) -> Function:
    """Returns what a wrapper calls where casts are off: `original`, which stays uncast in a graph.

    A graph names functions, and who runs it finds the patched ones by these names. That is right where
    casts are on: what the graph has cast is not cast again. Where they are off, the graph must say so.
    """
    package, _, name = ".".join(filter(None, place)).partition(".")
    if package != "torch" or name == "Tensor.__setitem__":  # which Dynamo traces as a statement
        return original
    return functools.partial(_call_original, original, name)


def _call_original(original: Function, name: str, *args: object, **kwargs: object) -> object:
    if torch.compiler.is_dynamo_compiling():
        return call_uncast(name, *args, **kwargs)
    return original(*args, **kwargs)

"""Functions that users add to the cast tables, by decorator or by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ClassMethodDescriptorType
from typing import TypeVar

import torch

from ampatch.casts.cast import CASTS
from ampatch.casts.wrapper import wrap
from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.precision import HALF_TYPES
from ampatch.patching.patcher import qualify
from ampatch.table import Cast

Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Registration:
    """One function that a user registered; `dtype` None is the half type of the level."""

    parent: object
    attribute: str
    cast: Cast
    dtype: torch.dtype | None = None


def validate_place(module: object, name: str) -> None:
    """Raises AmpValueError unless `module` has a callable attribute `name`."""
    if not isinstance(name, str):
        raise AmpTypeError(f"name is {name!r}: expected a string, the function's name in the module")
    owner = getattr(module, "__name__", None) or repr(module)
    if not hasattr(module, name):
        raise AmpValueError(f"no function named {name!r} in {owner}: check the name and the module")
    if not callable(getattr(module, name)):
        kind = type(getattr(module, name)).__name__
        raise AmpValueError(f"{owner}.{name} is a {kind}: expected a function")


def decorate(function: Function, cast: Cast, dtype: torch.dtype | None = None) -> Function:
    """Returns a function whose floating arguments are cast while a session patches torch.

    Works on plain functions, builtins, bound methods, staticmethods and classmethods.
    """
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(decorate(function.__func__, cast, dtype))
    if not callable(function):
        raise AmpTypeError(f"{function!r} is a {type(function).__name__}: expected a function to decorate")
    place = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    halves = HALF_TYPES if dtype is None else (dtype,)
    wrappers = {half: wrap(function, cast, half, place=place, is_users=True) for half in halves}

    @functools.wraps(function)
    def decorated(*args, **kwargs):
        half = CASTS.half
        if half is None:
            return function(*args, **kwargs)
        return wrappers[dtype or half](*args, **kwargs)

    return decorated


def bind(registration: Registration, original: object) -> object:
    """Returns what stands in for a registered function while torch is patched."""
    half = registration.dtype or CASTS.half
    assert half is not None, "bound while torch is not patched"
    binding, function = _unbind(original)
    wrapper = wrap(
        function,
        registration.cast,
        half,
        place=qualify(registration.parent, registration.attribute),
        is_users=True,
    )
    if isinstance(registration.parent, type) and not hasattr(original, "__get__"):
        binding = staticmethod  # a builtin, which is not bound to instances, and stays so
    return binding(wrapper) if binding else wrapper


def _unbind(original: object) -> tuple[type | None, Callable]:
    """Returns what binds a function to its class, if anything does, and the function itself."""
    if isinstance(original, ClassMethodDescriptorType):  # `apply` of torch.autograd.Function in torch 2.15
        return classmethod, lambda cls, *args, **kwargs: original.__get__(None, cls)(*args, **kwargs)
    if isinstance(original, (staticmethod, classmethod)):
        return type(original), original.__func__
    return None, original

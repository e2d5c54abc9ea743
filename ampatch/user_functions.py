"""The public functions that add a user's own functions to the cast tables."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ampatch.registration import Registration, decorate, validate_place
from ampatch.session import SESSION
from ampatch.table import Cast


def half_function(function: Callable) -> Callable:
    """Decorates a function to run in the half type of the level, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER, SESSION.casts)


def bfloat16_function(function: Callable) -> Callable:
    """Decorates a function to run in bfloat16, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER, SESSION.casts, torch.bfloat16)


def float_function(function: Callable) -> Callable:
    """Decorates a function to run in float32, while O1 or O4 is on."""
    return decorate(function, Cast.FP32, SESSION.casts)


def promote_function(function: Callable) -> Callable:
    """Decorates a function to run in the widest type of its arguments, while O1 or O4 is on."""
    return decorate(function, Cast.PROMOTE, SESSION.casts)


def register_half_function(module: object, name: str) -> None:
    """Has `module.name` run in the half type of the level at O1 and O4; before or after `initialize`.

    Raises AmpValueError, a ValueError, if the module has no such function.
    """
    _register(module, name, Cast.LOWER)


def register_bfloat16_function(module: object, name: str) -> None:
    """Has `module.name` run in bfloat16 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.LOWER, torch.bfloat16)


def register_float_function(module: object, name: str) -> None:
    """Has `module.name` run in float32 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.FP32)


def register_promote_function(module: object, name: str) -> None:
    """Has `module.name` run in the widest type of its arguments; as `register_half_function` otherwise."""
    _register(module, name, Cast.PROMOTE)


def _register(module: object, name: str, cast: Cast, dtype: torch.dtype | None = None) -> None:
    validate_place(module, name)
    SESSION.torch_patch.register(Registration(module, name, cast, dtype))

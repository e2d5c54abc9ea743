"""The public functions that add a user's own functions to the cast tables, and explain the tables."""

from __future__ import annotations

from typing import overload

import torch
from torch.nn import Module

from ampatch.casts.catalog import Catalog
from ampatch.casts.explanation import Explanation, Name
from ampatch.models.float8 import LayersExplained, explain_layers
from ampatch.patching.patcher import qualify
from ampatch.patching.registration import Function, Registration, decorate, validate_place
from ampatch.session.session import SESSION
from ampatch.table import Cast


def half_function(function: Function) -> Function:
    """Decorates a function to run in the half type of the level, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER)


def bfloat16_function(function: Function) -> Function:
    """Decorates a function to run in bfloat16, while O1 or O4 is on."""
    return decorate(function, Cast.LOWER, torch.bfloat16)


def float_function(function: Function) -> Function:
    """Decorates a function to run in float32, while O1 or O4 is on."""
    return decorate(function, Cast.FP32)


def promote_function(function: Function) -> Function:
    """Decorates a function to run in the widest type of its arguments, while O1 or O4 is on."""
    return decorate(function, Cast.PROMOTE)


def register_half_function(module: object, name: str) -> None:
    """Makes `module.name` run in the half type of the level at O1 and O4; before or after `initialize`.

    Raises AmpValueError, a ValueError, if the module has no such function.
    """
    _register(module, name, Cast.LOWER)


def register_bfloat16_function(module: object, name: str) -> None:
    """Makes `module.name` run in bfloat16 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.LOWER, torch.bfloat16)


def register_float_function(module: object, name: str) -> None:
    """Makes `module.name` run in float32 at O1 and O4; as `register_half_function` otherwise."""
    _register(module, name, Cast.FP32)


def register_promote_function(module: object, name: str) -> None:
    """Makes `module.name` run in the widest type of its arguments; as `register_half_function` otherwise."""
    _register(module, name, Cast.PROMOTE)


@overload
def explain(op: str) -> Explanation: ...
@overload
def explain(op: Module, float8_recipe: str = ...) -> LayersExplained: ...
def explain(op: str | Module, float8_recipe: str = "tensorwise") -> Explanation | LayersExplained:
    """Says what happens to an op at each level, under each of its names, and why.

    Of a model it says which linear layers compute in float8, or would at O6, and why others do not.

    `print(amp.explain("softmax"))` prints what `ampatch lists softmax` does; here, functions that the
    script registered are known as well. `op` may include its module, as in "torch.nn.functional.softmax",
    "F.softmax" or "my_ops.fused_gelu", and may be an operator, such as "@".

    Raises AmpValueError for what is not an op, and suggests close names.
    """
    if isinstance(op, Module):
        return explain_layers(op, float8_recipe, SESSION.members.float8)
    with SESSION.casts.thread.disabled():
        return Catalog(registered=map(_name, SESSION.torch_patch.registrations)).explain(op)


def _name(registration: Registration) -> Name:
    path = ".".join(filter(None, qualify(registration.parent, registration.attribute)))
    reason = "registered by the script"
    return Name(path, registration.cast, reason, dtype=registration.dtype)


def _register(module: object, name: str, cast: Cast, dtype: torch.dtype | None = None) -> None:
    validate_place(module, name)
    SESSION.torch_patch.register(Registration(module, name, cast, dtype))

"""Methods of a module that computes in float32, beside its forward, which the model around it calls."""

from __future__ import annotations

from types import FunctionType

import torch
from torch.nn import Module

from ampatch.casts.cast import CASTS
from ampatch.casts.cast_tree import cast_call, cast_object
from ampatch.models.hooks import CastOutputs, EnterAsGiven

_ENTER = EnterAsGiven(True, torch.float32)
_LEAVE = CastOutputs(None, keeps_losses=True)


class MethodInside:
    """A public method, as `normalize` or `rotate`, that acts as the forward does; what its module finds.

    Called by the module itself, or outside of any forward, it is the plain method.
    """

    def __init__(self, module: Module, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        module, forwards = self._module, CASTS.thread.forwards
        method = getattr(type(module), self._name)
        if not forwards or forwards[-1].owner == id(module):
            return method(module, *args, **kwargs)
        _ENTER(module, args)
        try:
            args, kwargs = cast_call(args, kwargs, torch.float32, cast_object(torch.float32))
            return _LEAVE(module, args, method(module, *args, **kwargs))
        finally:
            CASTS.thread.pop(id(module))


def replace_methods(module: Module) -> None:
    """Has the public methods of a module act as its forward does."""
    for name in {name for kind in type(module).__mro__ for name in _list_own(kind)} - vars(module).keys():
        vars(module)[name] = MethodInside(module, name)


def restore_methods(module: Module) -> None:
    """Takes them back."""
    for name in [name for name, value in vars(module).items() if isinstance(value, MethodInside)]:
        delattr(module, name)


def _list_own(kind: type) -> list[str]:
    """Names the public methods that a class defines, if torch's modules have none of that name."""
    methods = [name for name, value in vars(kind).items() if isinstance(value, FunctionType)]
    return [name for name in methods if not name.startswith("_") and not hasattr(Module, name)]

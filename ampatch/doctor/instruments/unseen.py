"""What torch shows no mode: functions of `torch.autograd.Function`, and what reentrant checkpoints repeat."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack

import torch.utils.checkpoint
from torch.autograd import Function

from ampatch.doctor.instruments.clock import wrap
from ampatch.doctor.instruments.trace import Trace

LIBRARIES = ("torch.", "ampatch.")  # whose functions stand for operations that were seen


def follow_unseen(trace: Trace, undo: ExitStack) -> None:
    """Has a trace see both at the place where they were called first, until undone."""
    reentrant = inspect.unwrap(torch.utils.checkpoint.CheckpointFunction)  # a session puts another there
    wrap(reentrant, "forward", functools.partial(remember, trace), undo)
    wrap(reentrant, "backward", functools.partial(repeat, trace), undo)
    held = vars(Function)["apply"]

    def apply(cls: type[Function], *args: object, **kwargs: object) -> object:
        given = held.__get__(None, cls)(*args, **kwargs)
        if not cls.__module__.startswith(LIBRARIES):
            trace.see_function(cls.__name__, (args, kwargs), given)
        return given

    undo.callback(setattr, Function, "apply", held)
    Function.apply = classmethod(apply)


def remember(trace: Trace, forward: Callable[..., object], ctx: object, *args: object) -> object:
    """Stands in for the forward."""
    ctx.ampatch_place = trace.models.save()
    return forward(ctx, *args)


def repeat(trace: Trace, backward: Callable[..., object], ctx: object, *args: object) -> object:
    """Stands in for the backward."""
    with trace.again(ctx.ampatch_place):
        return backward(ctx, *args)

"""Reentrant checkpoints, whose operations have a graph only when their backward pass repeats them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

from torch.utils.checkpoint import CheckpointFunction

from ampatch.doctor.instruments.clock import wrap
from ampatch.doctor.instruments.trace import Trace


def follow_checkpoints(trace: Trace, undo: ExitStack) -> None:
    """Has a trace see what they repeat at the place where it ran first, until undone."""
    wrap(CheckpointFunction, "forward", functools.partial(remember, trace), undo)
    wrap(CheckpointFunction, "backward", functools.partial(repeat, trace), undo)


def remember(trace: Trace, forward: Callable[..., object], ctx: object, *args: object) -> object:
    """Stands in for the forward."""
    ctx.ampatch_place = trace.models.save()
    return forward(ctx, *args)


def repeat(trace: Trace, backward: Callable[..., object], ctx: object, *args: object) -> object:
    """Stands in for the backward."""
    with trace.again(ctx.ampatch_place):
        return backward(ctx, *args)

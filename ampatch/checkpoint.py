"""Lets activation checkpointing recompute with casts on or off, as the first forward had them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch.utils.checkpoint

from ampatch.patcher import Patcher
from ampatch.thread import ThreadState

Function = Callable[..., object]


def patch_checkpoint(patcher: Patcher, thread: ThreadState) -> None:
    """Has both kinds of checkpointing repeat what `disable_casts` and float32 modules had turned off.

    The recomputation runs inside backward, where neither is around it. What is replaced are two names
    that `torch.utils.checkpoint.checkpoint` looks up: it may itself be bound to other names by now,
    and torch.compile knows it by identity.
    """
    module = torch.utils.checkpoint

    def keep(function: Function) -> Function:
        return _repeat_casts(function, thread)

    not_reentrant = getattr(module, "_checkpoint_without_reentrant_generator", None)
    if not_reentrant is not None:

        @functools.wraps(not_reentrant)
        def generate(function: Function, *args: object, **kwargs: object) -> object:
            return not_reentrant(keep(function), *args, **kwargs)

        patcher.replace(module, "_checkpoint_without_reentrant_generator", generate)
    reentrant = module.CheckpointFunction

    def apply(function: Function, *args: object) -> object:
        return reentrant.apply(keep(function), *args)

    patcher.replace(module, "CheckpointFunction", SimpleNamespace(apply=apply))


def _repeat_casts(function: Function, thread: ThreadState) -> Function:
    switch = thread.disabled if thread.off and thread.is_off() else thread.enabled

    def run(*args: object, **kwargs: object) -> object:
        with switch():
            return function(*args, **kwargs)

    return run

"""Lets activation checkpointing recompute with casts as the first forward had them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch.utils.checkpoint

from ampatch.casts.cast import CASTS
from ampatch.casts.thread import Forward
from ampatch.levels.private import REENTRANT
from ampatch.patching.patcher import Patcher

Function = Callable[..., object]

# What `checkpoint` calls: in torch 2.14, and before.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


def patch_checkpoint(patcher: Patcher) -> None:
    """Has both kinds of checkpointing repeat what was around the checkpoint: models, disabled casts.

    The recomputation runs inside backward, where neither is around it. What is replaced are two names
    that `torch.utils.checkpoint.checkpoint` looks up: it may itself be bound to other names by now,
    and torch.compile knows it by identity.
    """
    module = torch.utils.checkpoint
    name = next((name for name in _GENERATORS if hasattr(module, name)), None)
    if name is not None:
        patcher.replace(module, name, _repeat_generator(getattr(module, name)))
    reentrant = REENTRANT.find()

    def apply(function: Function, *args: object) -> object:
        return reentrant.apply(_repeat(function), *args)

    if reentrant is not None:
        patcher.replace(*REENTRANT.find_place(), SimpleNamespace(apply=apply))


def _repeat_generator(original: Function) -> Function:
    no_context = torch.utils.checkpoint.noop_context_fn

    @functools.wraps(original)
    def generate(function: Function, *args: object, **kwargs: object) -> object:
        by_place = args[1] if len(args) > 1 and callable(args[1]) else no_context
        is_selective = kwargs.get("context_fn", by_place) is not no_context
        if is_selective:
            # It counts operations, casts of weights among them, so that both runs must begin alike: with no
            # casts in the cache.
            CASTS.forget_casts()
        return original(_repeat(function, begins_empty=is_selective), *args, **kwargs)

    return generate


def _repeat(function: Function, *, begins_empty: bool = False) -> Function:
    """Returns `function` with casts on or off, and inside of the forward, as it is now."""
    thread = CASTS.thread
    switch = thread.disabled if thread.off and thread.is_off() else thread.enabled
    dtype = thread.forwards[-1].dtype if thread.forwards else None

    def run(*args: object, **kwargs: object) -> object:
        if begins_empty:
            CASTS.forget_casts()
        with switch():
            if not is_inside:
                return function(*args, **kwargs)
            thread.push(Forward(id(run), False, dtype, sys._getframe()))
            try:
                return function(*args, **kwargs)
            finally:
                thread.pop(id(run))

    is_inside = bool(thread.forwards)
    return run

"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch
import torch.utils.checkpoint
from torch.nn import Module

from ampatch.casts.cast import CASTS
from ampatch.casts.thread import Forward
from ampatch.errors import AmpValueError
from ampatch.levels.private import REENTRANT
from ampatch.patching.layers import widen_in_transforms
from ampatch.patching.patcher import Patcher, SessionPatch, peel
from ampatch.patching.scripting import is_ours

Function = Callable[..., object]


# What `checkpoint` calls: in torch 2.14, and before.
_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")


class BeforeGraph:
    """A forward pre-hook that does nothing in a graph, and is asked to `refresh` before one runs."""

    def refresh(self, args: tuple, kwargs: dict) -> None:
        """Brings up to date what the graph reads, given what the model is."""
        raise NotImplementedError


class TorchFeatures(SessionPatch):
    """Has checkpointing, transforms, overrides and compiled models work at every level but O0."""

    def patch(self, patcher: Patcher) -> None:
        """Patches what these features look up."""
        patch_checkpoint(patcher)
        widen_in_transforms(patcher)
        name_originals(patcher)
        refresh_compiled(patcher)
        refuse_hooks_of_ours(patcher)


def name_originals(patcher: Patcher) -> None:
    """Has functions that are written in Python introduce themselves by the originals.

    They look themselves up in their module, find the wrapper there and pass it on; but classes look
    what is passed up in tables of theirs, which hold the originals.
    """
    for module in (torch.functional, torch.nn.functional, torch._tensor):
        call = _call_with_original(module.handle_torch_function)  # type: ignore[attr-defined]
        patcher.replace(module, "handle_torch_function", call)


def _call_with_original(dispatch: Function) -> Function:
    def call(function: Function, relevant_args: Iterable[object], *args: object, **kwargs: object) -> object:
        return dispatch(peel(function), relevant_args, *args, **kwargs)

    return call


def refresh_compiled(patcher: Patcher) -> None:
    """Has a model that `torch.compile` returned run such hooks of its own before its graph.

    Without an optimizer nothing may have imported Dynamo yet, and there are no masters to write into.
    """
    eval_frame = sys.modules.get("torch._dynamo.eval_frame")
    if eval_frame is None:
        return
    original = eval_frame.OptimizedModule.__call__

    @functools.wraps(original)
    def call(self: Module, *args: object, **kwargs: object) -> object:
        if not torch.compiler.is_dynamo_compiling():
            for hook in self._orig_mod._forward_pre_hooks.values():  # type: ignore[union-attr]
                if isinstance(hook, BeforeGraph):
                    hook.refresh(args, kwargs)
        return original(self, *args, **kwargs)

    patcher.replace(eval_frame.OptimizedModule, "__call__", call)


def refuse_hooks_of_ours(patcher: Patcher) -> None:
    """Has `torch.cuda.make_graphed_callables`, which takes no module with hooks, name the way out."""
    original = torch.cuda.make_graphed_callables

    @functools.wraps(original)
    def make_graphed_callables(callables: object, *args: object, **kwargs: object) -> object:
        for module in callables if isinstance(callables, tuple) else (callables,):
            hooks = list(module._forward_pre_hooks.values()) if isinstance(module, Module) else []
            if any(map(is_ours, hooks)):
                raise AmpValueError(
                    f"torch.cuda.make_graphed_callables takes no module with hooks, and initialize put some "
                    f"on this {type(module).__name__}: give it torch.nn.Sequential(model), which has none"
                )
        return original(callables, *args, **kwargs)

    patcher.replace(torch.cuda, "make_graphed_callables", make_graphed_callables)


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
        patcher.replace(*REENTRANT.find_place(), SimpleNamespace(apply=apply, __wrapped__=reentrant))


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

"""What features of torch need to work on half models and on patched functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch.nn import Module

from ampatch.errors import AmpValueError
from ampatch.patching.features.checkpoint import patch_checkpoint
from ampatch.patching.features.layers import patch_batch_norm
from ampatch.patching.features.scripting import is_ours
from ampatch.patching.patcher import Patcher, SessionPatch, peel

Function = Callable[..., object]


class BeforeGraph:
    """A forward pre-hook that does nothing in a graph, and is asked to `refresh` before one runs."""

    def refresh(self) -> None:
        """Brings up to date what the graph reads, because the graph cannot look around."""
        raise NotImplementedError


class TorchFeatures(SessionPatch):
    """Has checkpointing, transforms, overrides and compiled models work at every level but O0."""

    def patch(self, patcher: Patcher) -> None:
        """Patches what these features look up."""
        patch_checkpoint(patcher)
        patch_batch_norm(patcher)
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
                    hook.refresh()
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

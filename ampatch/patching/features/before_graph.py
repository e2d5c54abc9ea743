"""What must happen before a compiled model's graph runs, because the graph cannot look around."""

from __future__ import annotations

import functools
import sys

import torch
from torch.nn import Module

from ampatch.patching.patcher import Patcher


class BeforeGraph:
    """A forward pre-hook that does nothing in a graph, and is asked to `refresh` before one runs."""

    def refresh(self) -> None:
        """Brings up to date what the graph reads."""
        raise NotImplementedError


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

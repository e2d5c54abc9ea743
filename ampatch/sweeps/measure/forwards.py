"""Hooks around the forwards of initialized models: when they begin and end, and what they are given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ampatch.sweeps.measure.bytes import tensors_in

Begin = Callable[[Module, tuple, dict], None]
End = Callable[[Module], None]


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBegins:
    """Tells that a forward begins; a forward pre-hook with kwargs.

    Does nothing under Dynamo, on other threads, and on a copy of the model, which has a hook of nobody's.
    """

    tell: Begin | None
    thread: int

    def __call__(self, module: Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_dynamo_compiling() or self.tell is None:
            return
        if threading.get_ident() == self.thread:
            self.tell(module, args, kwargs)

    def __reduce__(self) -> tuple:
        return ForwardBegins, (None, 0)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardEnds:
    """Tells that a forward ended well; a forward hook."""

    tell: End | None
    thread: int

    def __call__(self, module: Module, args: tuple, output: object) -> None:
        if torch.compiler.is_dynamo_compiling() or self.tell is None:
            return
        if threading.get_ident() == self.thread:
            self.tell(module)

    def __reduce__(self) -> tuple:
        return ForwardEnds, (None, 0)


def register_first(model: Module, hook: Callable[..., object], **options: bool) -> RemovableHandle:
    """Registers a forward pre-hook before all others.

    Not by `prepend`: Dynamo looks hooks up by their place, and before torch 2.9 does not see that they moved.
    """
    handle = model.register_forward_pre_hook(hook, **options)
    hooks = model._forward_pre_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def watch_forwards(model: Module, begin: Begin, end: End) -> Iterator[Callable[[], None]]:
    """Puts the hooks on a model, around all others, and yields what removes each; none on a scripted one."""
    if isinstance(model, torch.jit.ScriptModule):
        return
    thread = threading.get_ident()
    yield register_first(model, ForwardBegins(begin, thread), with_kwargs=True).remove
    yield model.register_forward_hook(ForwardEnds(end, thread)).remove


def count_samples(args: tuple, kwargs: Mapping[str, object]) -> int:
    """Returns how many samples a model was given: the length of the first tensor, 0 if there is none.

    >>> count_samples(("train",), {"x": torch.ones(8, 3)})
    8
    """
    first = args[0] if args else None
    if type(first) is not Tensor:
        first = next((it for value in (*args, *kwargs.values()) for it in tensors_in(value)), None)
    return 0 if first is None or first.dim() == 0 else first.shape[0]

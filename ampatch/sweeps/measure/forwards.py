"""The forwards of initialized models: when they begin and end, and how many samples they are given."""

from __future__ import annotations

import statistics
import threading
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from ampatch.tools.tensors import tensors_in


@dataclass(frozen=True, slots=True, eq=False)
class ForwardHook:
    """Tells of a forward: a hook, or a pre-hook with kwargs.

    Does nothing under Dynamo, on other threads, and on a copy of the model, which has a hook of nobody's.
    """

    tell: Callable[..., None] | None
    thread: int

    def __call__(self, module: Module, *given: object) -> None:
        if torch.compiler.is_dynamo_compiling() or self.tell is None:
            return
        if threading.get_ident() == self.thread:
            self.tell(module, *given)

    def __reduce__(self) -> tuple:
        return ForwardHook, (None, 0)


def register_first(model: Module, hook: Callable[..., object], **options: bool) -> RemovableHandle:
    """Registers a forward pre-hook before all others.

    Not by `prepend`: Dynamo looks hooks up by their place, and before torch 2.9 does not see that they moved.
    """
    handle = model.register_forward_pre_hook(hook, **options)
    hooks = model._forward_pre_hooks
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)
    return handle


def watch_forwards(
    model: Module, begin: Callable[..., None], end: Callable[..., None], undo: ExitStack
) -> None:
    """Puts the hooks on a model, around all others, until `undo` is closed; none on a scripted one."""
    if isinstance(model, torch.jit.ScriptModule):
        return
    thread = threading.get_ident()
    undo.callback(register_first(model, ForwardHook(begin, thread), with_kwargs=True).remove)
    undo.callback(model.register_forward_hook(ForwardHook(end, thread)).remove)


def count_samples(args: tuple, kwargs: Mapping[str, object]) -> int:
    """Returns how many samples a model was given: the length of the first tensor, 0 if there is none.

    >>> count_samples(("train",), {"x": torch.ones(8, 3)})
    8
    """
    first = args[0] if args else None
    if type(first) is not Tensor:
        first = next((it for value in (*args, *kwargs.values()) for it in tensors_in(value)), None)
    return 0 if first is None or first.dim() == 0 else first.shape[0]


class Samples:
    """Counts the samples that models are given, or takes what the script reports.

    Of several models in a step the one that was given the fewest counts: a discriminator sees real and
    made-up samples.
    """

    def __init__(self) -> None:
        self._present: Counter[int] = Counter()
        self._counted = array("q")
        self._reported = array("d")

    def add(self, model: int, samples: int) -> None:
        """Takes the samples of a forward."""
        self._present[model] += samples

    def end_step(self) -> None:
        """Ends a step; one in which nobody looked has none."""
        counts = [count for count in self._present.values() if count]
        if counts:
            self._counted.append(min(counts))
        self._present.clear()

    def report(self, samples: float) -> None:
        """Takes what a script says a step has, which counts from now on."""
        self._reported.append(samples)

    def median(self) -> float | None:
        """Returns the samples of a step; None if models were given no tensors, or never called."""
        values = self._reported or self._counted
        return float(statistics.median(values)) if values else None

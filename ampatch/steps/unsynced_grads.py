"""Gradients that DistributedDataParallel has not averaged yet: those of forwards under its `no_sync`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ampatch.steps.master_grads import clear_master_grad
from ampatch.steps.scaler import Scale
from ampatch.steps.weight import Weight


class LocalGrads:
    """Knows which gradients of one optimizer stay on their rank.

    The next backward that is synchronized averages what has accumulated in `.grad` by then. So these
    gradients have to stay there as they are, scaled. `are_waiting` says that some do; `read_scale` is
    what they were scaled by, if somebody wanted to read them before.
    """

    def __init__(self) -> None:
        self._models: set[int] = set()
        self.are_waiting = False
        self.read_scale: Scale | None = None
        self.read_found_inf: Tensor | None = None

    @property
    def are_coming(self) -> bool:
        """Whether the block that is open, or the next one, makes such gradients."""
        return bool(self._models)

    def mark(self, model: Module, is_local: bool) -> None:
        """Notes whether a model's forward, with its backward to come, is under `no_sync`."""
        (self._models.add if is_local else self._models.discard)(id(model))

    def wait(self) -> None:
        """Notes that a block leaves what it made."""
        self.are_waiting |= self.are_coming
        self._models.clear()

    def drop_coming(self) -> None:
        """Notes that a block ended in an exception."""
        self._models.clear()


@torch.no_grad()
def scale_again(own: Iterable[Tensor], pairs: Iterable[Weight], before: Scale, scale: Scale) -> None:
    """Goes on as if nobody had read the gradients that wait: they are not averaged yet."""
    for param in own:
        param.grad = None if param.grad is None else scale.scale(param.grad)
    for pair in pairs:
        pair.half.grad = None if pair.half.grad is None else scale.rescale(pair.half.grad, before)
        clear_master_grad(pair)


@dataclass(frozen=True, slots=True)
class NoteNoSync:
    """Tells whether a forward is under `no_sync`; a forward pre-hook of a model.

    A deep copy or a pickled model has no optimizers to tell.
    """

    listeners: Sequence[LocalGrads] = ()

    def __deepcopy__(self, memo: dict) -> NoteNoSync:
        return NoteNoSync()

    def __reduce__(self) -> tuple:
        return NoteNoSync, ()

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        ddp = DistributedDataParallel._active_ddp_module  # whose forward this call is inside of
        if ddp is not None and torch.is_grad_enabled():
            for grads in self.listeners:
                grads.mark(module, not ddp.require_backward_grad_sync)

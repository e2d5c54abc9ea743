"""Gradients that DistributedDataParallel has not averaged yet: those of forwards under its `no_sync`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ampatch.steps.master_grads import clear_master_grad
from ampatch.steps.scaler import Scale
from ampatch.steps.weight import Weight


@dataclass(slots=True, eq=False)
class LocalGrads:
    """Knows which gradients of one optimizer stay on their rank.

    The next backward that is synchronized averages what has accumulated in `.grad` by then. So these
    gradients have to stay there as they are, scaled.
    """

    coming: set[int] = field(default_factory=set)  # models whose next backward makes such, by id
    are_waiting: bool = False
    read_scale: Scale | None = None  # what they were scaled by, if somebody wanted to read them before
    read_found_inf: Tensor | None = None


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

    def __reduce__(self) -> tuple:
        return NoteNoSync, ()

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        ddp = DistributedDataParallel._active_ddp_module  # whose forward this call is inside of
        if ddp is not None and torch.is_grad_enabled():
            for grads in self.listeners:
                note = grads.coming.discard if ddp.require_backward_grad_sync else grads.coming.add
                note(id(module))

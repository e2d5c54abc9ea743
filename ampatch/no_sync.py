"""Notices forwards under DistributedDataParallel's `no_sync`, whose gradients stay on their rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from ampatch.optimizer import AmpOptimizer


@dataclass(frozen=True, slots=True)
class NoteNoSync:
    """Tells optimizers that the coming gradients are not averaged over ranks; a forward pre-hook.

    The next backward that is synchronized averages what has accumulated in `.grad` by then. So these
    gradients have to stay there as they are, scaled. A deep copy or a pickled model has no optimizer.
    """

    optimizers: Sequence[AmpOptimizer] = ()

    def __deepcopy__(self, memo: dict) -> NoteNoSync:
        return NoteNoSync()

    def __reduce__(self) -> tuple:
        return NoteNoSync, ()

    def __call__(self, module: Module, args: tuple) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        ddp = DistributedDataParallel._active_ddp_module  # whose forward this call is inside of
        if ddp is None or ddp.require_backward_grad_sync or not torch.is_grad_enabled():
            return
        for optimizer in self.optimizers:
            optimizer.has_local_grads = True

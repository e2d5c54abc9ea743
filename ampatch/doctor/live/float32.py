"""Does a recorded step again in float32, and says whether it breaks there as well."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.operations import CASTS, name_of
from ampatch.doctor.instruments.places import OURS, SCALERS, unwrap
from ampatch.doctor.instruments.values import is_finite, off_casts, tensors_in
from ampatch.doctor.live.record import Backward, LossOperation, Record, Slot
from ampatch.doctor.live.rerun import Impossible, Rerun


class InFloat32(Rerun):
    """Does a step again on float32 copies of the models, with no casts and no loss scale."""

    def __init__(
        self, record: Record, models: Sequence[Module], optimizers: Sequence[Optimizer], clock: Clock
    ) -> None:
        if not record.slots.is_whole:
            raise Impossible("how the loss came of the model is not known")
        masters = {id(half): master for one in optimizers for half, master in masters_of(one)}
        self._twins: dict[int, Tensor] = {}  # parameters of the copies, by the ids of those they stand for
        copies = {id(model): copy_in_float32(unwrap(model), masters, self._twins) for model in models}
        super().__init__(record, copies, clock)
        self.casts = False

    def run(self) -> None:
        """Does all events, with casts off."""
        with off_casts():
            super().run()

    def is_finite(self) -> bool:
        """Says whether all losses and gradients of the run are finite."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        losses = [self.values[one.loss] for one in self._record.of(Backward)]
        with off_casts():
            return all(map(is_finite, [*gradients, *losses]))

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Slot):
            return super()._resolve(value)
        if id(value) in self._twins:
            return self._twins[id(value)]
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def operate(self, event: LossOperation) -> None:
        """Makes an operation again, but for our casts and the loss scale."""
        if is_of_precision(event):
            self.keep(event.outputs, self.resolve(event.args[0]))
            return
        super().operate(event)


def is_of_precision(event: LossOperation) -> bool:
    """Says whether an operation is a cast of ours, or a scaler's product."""
    name = name_of(event.function)
    is_ours = bool(event.frames) and event.frames[0][0].co_filename.startswith(OURS[0])
    is_scaler = any(code.co_filename.endswith(SCALERS) for code, _ in event.frames)
    return (is_ours and name in CASTS) or (is_scaler and name in ("mul", "mul_"))


def masters_of(optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Returns the half weights of an optimizer and their masters, none where it is not ours."""
    try:
        return list(amp.master_pairs(optimizer))
    except amp.AmpError:
        return []


def copy_in_float32(model: Module, masters: Mapping[int, Tensor], twins: dict[int, Tensor]) -> Module:
    """Returns a copy of a model with float32 weights, those of the masters where there are any."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for value in vars(module).values():
            for tensor in tensors_in(value):
                if tensor.grad_fn is not None:  # what a forward left on the module
                    memo[id(tensor)] = tensor.detach()
    copied = copy.deepcopy(model, memo).float()
    for own, twin in zip(model.parameters(), copied.parameters(), strict=True):
        twins[id(own)] = twin
        if id(own) in masters:
            with torch.no_grad():
                twin.copy_(masters[id(own)])
        twin.grad = None
    return copied

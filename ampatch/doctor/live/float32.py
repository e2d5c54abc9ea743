"""Does a recorded step again in float32, and says whether it breaks there as well."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.instruments.operations import CASTS, name_of
from ampatch.doctor.instruments.places import OURS, SCALERS, unwrap
from ampatch.doctor.instruments.values import is_finite, off_casts, tensors_in
from ampatch.doctor.live.record import Backward, Operation, Record, Slot
from ampatch.doctor.live.rerun import Impossible, Rerun


class InFloat32(Rerun):
    """Does a step again on float32 copies of the models, with no casts and no loss scale."""

    def __init__(self, record: Record, models: Mapping[int, Module], twins: Mapping[int, Tensor]) -> None:
        super().__init__(record, models)
        self._twins = twins  # parameters of the copies, by the ids of those that they stand for
        self.casts = False

    def _resolve(self, value: Tensor | Slot) -> Tensor:
        if isinstance(value, Slot):
            return super()._resolve(value)
        if id(value) in self._twins:
            return self._twins[id(value)]
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value

    def operate(self, event: Operation) -> None:
        """Makes an operation again, but for our casts and the loss scale."""
        if is_of_precision(event):
            self.keep(event.outputs, self.resolve(event.args[0]))
            return
        super().operate(event)


def is_of_precision(event: Operation) -> bool:
    """Says whether an operation is a cast of ours, or a scaler's product."""
    name = name_of(event.function)
    is_ours = bool(event.frames) and event.frames[0][0].co_filename.startswith(OURS[0])
    is_scaler = any(code.co_filename.endswith(SCALERS) for code, _ in event.frames)
    return (is_ours and name in CASTS) or (is_scaler and name in ("mul", "mul_"))


def survives_in_float32(record: Record, models: Sequence[Module], optimizers: Sequence[Optimizer]) -> bool:
    """Says whether a step stays finite in float32; raises Impossible where that cannot be tried."""
    if not record.slots.is_whole:
        raise Impossible("how the loss came of the model is not known")
    masters = {id(half): master for one in optimizers for half, master in masters_of(one)}
    twins: dict[int, Tensor] = {}
    copies = {id(model): copy_in_float32(unwrap(model), masters, twins) for model in models}
    run = InFloat32(record, copies, twins)
    with off_casts():
        run.run()
        gradients = [p.grad for p in run.parameters if p.grad is not None]
        losses = [run.values[one.loss] for one in record.events if isinstance(one, Backward)]
        return all(map(is_finite, [*gradients, *losses]))


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

"""An attempt at a step whose outcome may still be on the device, and what its replay needs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp
from ampatch.doctor.instruments.operations import nodes_of
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.live.flag import Flag
from ampatch.doctor.live.record import Forward, Record

NONE = 2**63  # above the number of each node


@dataclass(slots=True)
class Step:
    """An attempt at a step whose outcome may still be on the device, and what it takes to replay it."""

    optimizer: weakref.ref[Optimizer]
    number: int
    record: Record
    flag: Flag | None
    outcomes: Sequence[amp.BackwardOutcome] = ()
    skipped: bool | None = None
    scale: float | None = None
    is_dynamic: bool = False

    def is_known(self) -> bool:
        """Says whether asking would not wait for a device."""
        is_late = self.flag is not None and self.flag.is_late
        return self.skipped or not (is_late or any(outcome.poll() is None for outcome in self.outcomes))

    def judge(self) -> Attempt:
        """Returns what came of it."""
        read = [outcome.read() for outcome in self.outcomes]
        bad = self.skipped or any(overflowed for overflowed, *_ in read)
        losses = all(outcome.is_loss_finite is not False for outcome in self.outcomes)
        scale = read[0][1] if read else self.scale
        if self.flag is not None and self.flag.read():
            found = [bool(torch.isfinite(value).all()) for value in self.record.losses]
            losses = losses and all(found)
            bad = bad or losses
        elif bad:
            losses = losses and all(bool(torch.isfinite(value).all()) for value in self.record.losses)
        return Attempt(self.number, scale, self.is_dynamic or bool(read), losses, not bad)


def outcomes_of(optimizer: Optimizer) -> tuple[amp.BackwardOutcome, ...] | None:
    """Returns what our scaler found before the last step, None for an optimizer that is not ours."""
    try:
        return amp.backward_outcomes(optimizer)
    except amp.AmpError:
        return None


def hold_gradients(record: Record, roots: Sequence[Tensor]) -> bool:
    """Has the gradients kept that come back to what models returned; says whether any can.

    For a loss that cannot be made again. Nodes of a graph are numbered as they are made, and a number
    keeps nothing alive.
    """
    places = [(it, slot, number, which) for it in record.of(Forward) for slot, number, which in it.nodes]
    oldest = min([number for *_, number, _ in places], default=NONE)
    nodes = {node._sequence_nr(): node for node in nodes_of(roots, oldest)}
    found = [place for place in places if place[2] in nodes]
    for forward, slot, number, which in found:
        nodes[number].register_prehook(functools.partial(_hold, forward, slot, which))
    return bool(found)


def _hold(forward: Forward, slot: int, which: int, gradients: tuple[Tensor | None, ...]) -> None:
    if gradients[which] is not None:
        forward.gradients[slot] = gradients[which]


Object = TypeVar("Object")


def alive(references: Iterable[weakref.ref[Object]]) -> list[Object]:
    """Returns those objects that the script still has."""
    return [found for find in references if (found := find()) is not None]


@torch.no_grad()
def copy_weights(models: Sequence[Module]) -> list[tuple[Tensor, Tensor]]:
    """Copies the weights of models; no host sync."""
    weights = [parameter for model in models for parameter in model.parameters()]
    copies = [torch.empty_like(weight) for weight in weights]
    if weights:
        torch._foreach_copy_(copies, weights)
    return list(zip(weights, copies, strict=True))

"""Notes at each attempt at a step whether loss, gradients and weights were finite, and at which scale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.operations import Enough
from ampatch.doctor.instruments.places import parameters_of
from ampatch.doctor.instruments.values import are_finite, is_finite, quiet, tensors_in
from ampatch.levels.precision import HALF_TYPES

MOST_LOST = 250  # attempts in a row that leave bad weights: more than a trial makes after a fault


@dataclass(slots=True)
class Attempt:
    """One step of an optimizer, made or skipped: `step` counts those of this optimizer, from 0.

    `scale` is that of the backward pass, None without one; `is_dynamic` says whether overflows lower it.
    """

    step: int = 0
    scale: float | None = None
    is_dynamic: bool = False
    loss: bool = True
    gradients: bool = True
    weights: bool = True
    is_again: bool = False  # of the backward pass that the attempt before was of
    left_out: bool = False  # a model gave bad numbers, and no backward pass followed
    value: float = 0.0  # of the loss, of several backward passes their mean
    buffer: str | None = None  # the first that has become bad
    seconds: float = 0.0  # since the attempt before, with what it costs to watch

    @property
    def is_finite(self) -> bool:
        """Says whether all was finite."""
        return self.loss and self.gradients and self.weights


class Watch(Instrument):
    """Watches a run to its end, for as many attempts as are wanted, or until weights stay lost.

    Costs some host syncs a step.
    """

    def __init__(self, clock: Clock, most: int | None = None) -> None:
        super().__init__(clock)
        self._most = most
        self.is_late = False  # whether the run has taken too long, and ends with this attempt
        self.attempts: list[Attempt] = []
        self._now = Attempt()
        self._since = perf_counter()
        self._steps: Counter[Optimizer] = Counter()
        self._is_bad = False  # what a model gave, since the last backward pass
        self._has_backward = False  # since the last attempt
        self._losses: list[float] = []  # since the last attempt
        self._lost = 0  # attempts in a row that have left bad weights
        self._old: set[int] = set()  # parameters whose gradients were bad before it, of another step maybe
        self._unset: set[int] = set()  # buffers that are bad from the beginning
        self._models = 0  # how many have run
        self.is_half = False  # whether a model has half parameters
        self.is_open = False  # whether a forward that learns was followed by no step

    def enter_model(self, model: Module, args: tuple) -> None:
        """Notes that a forward that learns begins."""
        if self._models < len(self.clock.models.roots):
            with quiet():
                self._unset |= set(map(id, self.clock.models.lost_buffers(self._models)))
            self._models = len(self.clock.models.roots)
        if torch.is_grad_enabled():
            self.is_open = True
            self.is_half |= any(it.dtype in HALF_TYPES for it in model.parameters())
            self._now.left_out |= self._is_bad
            self._is_bad = False

    def see_output(self, module: Module, output: object) -> None:
        """Looks at what a model gives."""
        if self.clock.models.depth == 1 and torch.is_grad_enabled():
            self._is_bad |= not are_finite(tensors_in(output))

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Looks at the loss, and at the scale of ours; that of torch is asked at the attempt."""
        self._is_bad, self._has_backward = False, True
        self._now.loss &= are_finite(losses)
        self._losses.append(sum(it.sum().item() for it in losses))
        parameters = self.clock.models.parameters()
        self._old = set() if have_finite_grads(parameters) else bad_of(parameters)
        if (scaler := self.clock.scaler) is not None:
            self._now.scale, self._now.is_dynamic = scaler.get_scale(), scaler.is_dynamic

    def end_backward(self) -> None:
        """Looks at the gradients."""
        made = (it for it in self.clock.models.parameters() if id(it) not in self._old)
        self._now.gradients &= have_finite_grads(made)

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Takes the scale of torch's scaler, and numbers the attempt."""
        if scaler is not None and scaler.is_enabled():
            self._now.scale, self._now.is_dynamic = scaler.get_scale(), True
        elif self._now.scale is None and not self._has_backward and self.attempts:  # the second of one loss
            self._now = replace(self.attempts[-1], weights=True, left_out=False, is_again=True)
        own = (it for it in parameters_of(optimizer) if id(it) in self._old)
        self._now.gradients &= have_finite_grads(own)
        self._now.step = self._steps[optimizer]
        self._steps[optimizer] += 1

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Looks at the weights, at buffers, and at the optimizer's state."""
        state = tensors_in(list(optimizer.state.values()))
        held = [*parameters_of(optimizer), *self.clock.models.parameters(), *state]
        self._now.weights &= are_finite(held)
        lost = [it for it in self.clock.models.lost_buffers() if id(it) not in self._unset]
        self._now.weights &= not lost
        self._now.buffer = self.clock.models.name_of_buffer(lost[0]) if lost else None
        if self._losses:
            self._now.value = sum(self._losses) / len(self._losses) / (self._now.scale or 1.0)
        self._now.seconds = perf_counter() - self._since
        self.attempts.append(self._now)
        self._lost = 0 if self._now.weights else self._lost + 1
        self._now, self.is_open, self._since = Attempt(), False, perf_counter()
        self._has_backward, self._losses = False, []
        if self.is_late or len(self.attempts) == self._most or self._lost == MOST_LOST:
            raise Enough


def have_finite_grads(parameters: Iterable[Tensor]) -> bool:
    """Says whether all numbers of the gradients that parameters have are finite."""
    return are_finite(it.grad for it in parameters if it.grad is not None)


def bad_of(parameters: Iterable[Tensor]) -> set[int]:
    """Returns those whose gradients are not finite, by their ids."""
    return {id(it) for it in parameters if it.grad is not None and not is_finite(it.grad)}

"""Notes at each attempt at a step whether loss, gradients and weights were finite, and at which scale."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS, Clock, Instrument
from ampatch.doctor.instruments.places import parameters_of
from ampatch.doctor.instruments.tape import Enough
from ampatch.doctor.instruments.values import (
    HALF,
    are_finite,
    floating_in,
    is_finite,
    plain,
    quiet,
    tensors_in,
)
from ampatch.levels.precision import HALF_TYPES
from ampatch.tools.tensors import read_numbers

MOST_LOST = 250  # attempts in a row that leave bad weights: more than a trial makes after a fault

FETCHED = 50  # attempts whose magnitudes are fetched together
GROWN = 4.0  # times what it was at first: more than training usually does
STILL = 1.5  # times what it was at first: not yet growing
NEAR = 16.0  # times smaller than what overflows
TOGETHER = 0.1  # of the time up to the end: layers that begin so close begin together

Layer = tuple[str, str, str]  # "output" or "weight", model, module


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

    @property
    def is_finite(self) -> bool:
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
            self.is_half |= any(parameter.dtype in HALF_TYPES for parameter in model.parameters())
            self._now.left_out |= self._is_bad
            self._is_bad = False

    def see_output(self, module: Module, output: object) -> None:
        if self.clock.models.depth == 1 and torch.is_grad_enabled():
            self._is_bad |= not are_finite(tensors_in(output))

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Looks at the loss, and at the scale of ours; that of torch is asked at the attempt."""
        self._is_bad, self._has_backward = False, True
        self._now.loss &= are_finite(losses)
        self._losses.append(sum(loss.sum().item() for loss in losses))
        parameters = self.clock.models.parameters()
        self._old = set() if have_finite_grads(parameters) else bad_of(parameters)
        if (scaler := self.clock.scaler) is not None:
            self._now.scale, self._now.is_dynamic = scaler.get_scale(), scaler.is_dynamic

    def end_backward(self) -> None:
        made = (parameter for parameter in self.clock.models.parameters() if id(parameter) not in self._old)
        self._now.gradients &= have_finite_grads(made)

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Takes the scale of torch's scaler, and numbers the attempt."""
        if scaler is not None and scaler.is_enabled():
            self._now.scale, self._now.is_dynamic = scaler.get_scale(), True
        elif self._now.scale is None and not self._has_backward and self.attempts:  # the second of one loss
            self._now = replace(self.attempts[-1], weights=True, left_out=False, is_again=True)
        own = (parameter for parameter in parameters_of(optimizer) if id(parameter) in self._old)
        self._now.gradients &= have_finite_grads(own)
        self._now.step = self._steps[optimizer]
        self._steps[optimizer] += 1

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Looks at the weights, at buffers, and at the optimizer's state."""
        state = tensors_in(list(optimizer.state.values()))
        held = [*parameters_of(optimizer), *self.clock.models.parameters(), *state]
        self._now.weights &= are_finite(held)
        lost = [buffer for buffer in self.clock.models.lost_buffers() if id(buffer) not in self._unset]
        self._now.weights &= not lost
        self._now.buffer = self.clock.models.name_of_buffer(lost[0]) if lost else None
        if self._losses:
            self._now.value = sum(self._losses) / len(self._losses) / (self._now.scale or 1.0)
        self.attempts.append(self._now)
        self._lost = 0 if self._now.weights else self._lost + 1
        self._now, self.is_open = Attempt(), False
        self._has_backward, self._losses = False, []
        if self.is_late or len(self.attempts) == self._most or self._lost == MOST_LOST:
            raise Enough


def have_finite_grads(parameters: Iterable[Tensor]) -> bool:
    return are_finite(parameter.grad for parameter in parameters if parameter.grad is not None)


def bad_of(parameters: Iterable[Tensor]) -> set[int]:
    return {
        id(parameter)
        for parameter in parameters
        if parameter.grad is not None and not is_finite(parameter.grad)
    }


# ---- Numbers that grow ----


@dataclass(slots=True)
class Magnitude:
    """How large the numbers of a layer are: the first that is not 0, the latest, and the largest."""

    first: float = 0.0
    latest: float = 0.0
    largest: float = 0.0  # inf where it overflowed
    still: int = 0  # the latest attempt at which it was as at first

    def add(self, attempt: int, value: float) -> None:
        """Goes on to what it is at another attempt."""
        self.largest = max(self.largest, value)
        if value < math.inf:
            self.first, self.latest = self.first or value, value
            self.still = attempt if value <= STILL * self.first else self.still


class Growth(Instrument):
    """Follows how large the outputs and weights of layers become; costs a host sync in 50 attempts."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._half = ""
        self._waiting: dict[tuple[Layer, int], Tensor] = {}  # by layer and attempt
        self._known: dict[Layer, Magnitude] = {}

    def see_output(self, module: Module, output: object) -> None:
        """Notes an output of training."""
        place = self.clock.models.place
        if torch.compiler.is_compiling() or place is None or not torch.is_grad_enabled():
            return
        if self.clock.micro_step < MOST_MICRO_STEPS:
            with quiet():
                self._note(("output", place.model, place.module), floating_in(output))

    def _note(self, layer: Layer, tensors: Iterable[Tensor]) -> None:
        key = layer, self.clock.attempt
        for values in (plain(tensor) for tensor in tensors if tensor.numel() and not tensor.is_meta):
            if values.numel():  # of a sharded tensor another rank may have all
                largest = values.abs().amax()
                known = self._waiting.get(key)
                self._waiting[key] = largest if known is None else torch.maximum(largest, known)
                name = str(values.dtype)[6:]
                self._half = self._half or (name if name in HALF and layer[0] == "output" else "")

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Notes the weights after the step."""
        for model, path, weight in self.clock.models.named_parameters():
            self._note(("weight", model, path.rpartition(".")[0]), floating_in(weight))
        if self.clock.attempt % FETCHED == FETCHED - 1:
            self._fetch()

    def _fetch(self) -> None:
        with quiet():
            numbers = read_numbers([*self._waiting.values()])
        for (layer, attempt), value in zip(self._waiting, numbers, strict=True):
            value = value if math.isfinite(value) else math.inf
            self._known.setdefault(layer, Magnitude()).add(attempt, value)
        self._waiting.clear()

    def facts(self) -> dict[str, object]:
        """Returns how many times larger than at first weights are, or outputs: "grown"; and where it began.

        Of outputs it counts only what comes near an overflow. It began in the first layer, in the order in
        which they run, of those that began to grow first: what overflows later may only be handed on.
        """
        self._fetch()
        half = self._half or "float16"
        outputs = {layer: growth for layer, growth in self._known.items() if layer[0] == "output"}
        weights = [growth for layer, growth in self._known.items() if layer[0] == "weight" and growth.first]
        ratios = (growth.largest / growth.first for growth in weights if growth.largest < math.inf)
        times, grew = max(ratios, default=1.0), ""
        growing = {layer: growth for layer, growth in outputs.items() if growth.latest > GROWN * growth.first}
        limit = torch.finfo(getattr(torch, half)).max
        if growing and max(growth.largest for growth in outputs.values()) > limit / NEAR:
            start = min(growth.still for growth in growing.values())
            start += int(TOGETHER * (self.clock.attempt - start))
            (_, *names), began = next(pair for pair in growing.items() if pair[1].still <= start)
            times = max(times, began.latest / began.first)
            grew = f", from step {began.still} on in {'.'.join(filter(None, names))}"
        return {"grown": max(times, 1.0), "grew": grew, "half": half}

"""What half is too coarse to add: weights, averages and gradients that stay as they were, again and again."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

import ampatch as amp
from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.places import user_line
from ampatch.doctor.instruments.tape import Op
from ampatch.doctor.instruments.values import is_finite, plain, quiet
from ampatch.doctor.silent.notes import STUCK, Notes
from ampatch.levels.precision import HALF_TYPES

FEWEST = 16  # numbers of a tensor
MANY = 0.5  # of the numbers stay as they were
WRONG = 0.1  # of a sum
SOME = 0.1  # of the weights: a fault where the loss falls less than in float32
REPEATED = 3  # attempts
EMPTY: Mapping[str, str] = MappingProxyType({})
ADDED = (15, 63, 255, 511, 1023)  # backward passes of an attempt, after which gradients are looked at


class Stuck(Instrument, amp.Observer):
    """Looks at the steps and gradients of the attempts in `window`, and at averages that it is shown."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        super().__init__(clock)
        self._notes, self._window = notes, window
        self._seen: defaultdict[Hashable, list[int]] = defaultdict(list)  # attempts, by where it was
        self._weights: list[tuple[Tensor, Tensor]] = []  # in half, and what a step is to change
        self._sums: dict[Tensor, Tensor] = {}  # of gradients in half, by parameters
        self._hooks: list[RemovableHandle] = []
        self._level: dict[str, str] = {}  # which has `initialize` keep no masters
        clock.undo.enter_context(amp.observe(self))

    def on_initialize(self, policy: amp.Policy) -> None:
        if policy.is_pure_half:
            self._level = {"level": policy.opt_level}

    def look_at_update(self, operation: Operation, _: object, into: Tensor) -> None:
        """Counts the numbers of an average that stay as they were."""
        by = operation.args[1] if len(operation.args) > 1 else None
        if into.dtype not in HALF_TYPES or into.numel() < FEWEST or not isinstance(by, Tensor):
            return
        into = into.detach()
        weight = operation.kwargs.get("alpha", operation.kwargs.get("weight", (*operation.args, 1)[2]))
        gap = plain(by).float() - (into.float() if operation.name == "lerp_" else 0.0)
        least = torch.finfo(into.dtype).eps * into.float().abs() if weight != 1 else 0.0  # it has arrived
        stays = (into.float() + gap * weight).to(into.dtype) == into
        name = self.clock.models.name_of_buffer(into)
        facts = {} if name is None else {"buffer": name}
        self._count(operation.record, share_of(stays, gap.abs() > least), STUCK, facts)

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        """Keeps the half weights that a step is to change."""
        groups = (group["params"] for group in optimizer.param_groups if group.get("lr", 1.0) != 0)
        half = [
            weight
            for group in groups
            for weight in group
            if weight.dtype in HALF_TYPES and weight.grad is not None
        ]
        is_due = self.clock.attempt in self._window and all(is_finite(weight.grad) for weight in half)
        self._weights = [
            (weight, plain(weight).clone()) for weight in half if weight.numel() >= FEWEST and is_due
        ]

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Counts the numbers that a step left as they were."""
        self._forget_sums()
        if self._weights:
            stays = torch.cat([(plain(weight) == before).flatten() for weight, before in self._weights])
            is_due = torch.cat([plain(weight.grad).flatten() != 0 for weight, _ in self._weights])
            dtype = name_of(self._weights[0][0].dtype)
            record = Op("step", "optimizer", None, user_line(), dtype)
            self._count(record, share_of(stays, is_due), SOME, self._level)
        self._weights = []

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Has what the backward passes of an attempt make added up in float32 as well."""
        if self.clock.micro_step == 0:
            self._forget_sums()
            held = self.clock.models.parameters() if self.clock.attempt in self._window else ()
            half = (
                weight
                for weight in held
                if weight.dtype in HALF_TYPES and weight.requires_grad and not holds_half(weight)
            )
            self._hooks = [weight.register_hook(functools.partial(self._add, weight)) for weight in half]
        elif self.clock.micro_step in ADDED:  # a script, or masters, may have taken the sum by now
            self._sums = {weight: wanted for weight, wanted in self._sums.items() if holds_half(weight)}

    def _add(self, parameter: Tensor, grad: Tensor) -> None:
        with quiet():
            self._sums[parameter] = self._sums.get(parameter, 0.0) + plain(grad).float()

    def end_backward(self) -> None:
        """Compares the gradients with the sums in float32."""
        if self.clock.micro_step not in ADDED or not self._sums:
            return
        pairs = [
            (plain(weight.grad).float(), wanted)
            for weight, wanted in self._sums.items()
            if holds_half(weight)
        ]
        error = sum((have - wanted).square().sum().item() for have, wanted in pairs)
        size = sum(wanted.square().sum().item() for _, wanted in pairs)
        if size and math.isfinite(size):
            dtype = name_of(next(iter(self._sums)).dtype)
            record = Op("accumulate_grad", "backward", None, user_line(), dtype)
            self._count(record, math.sqrt(error / size), WRONG)

    def _forget_sums(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._sums = [], {}

    def _count(self, record: Op, share: float, most: float, facts: Mapping[str, str] = EMPTY) -> None:
        seen = self._seen[record.site]
        if share > most and self.clock.attempt not in seen:
            seen.append(self.clock.attempt)
            if len(seen) == REPEATED:
                more = {"share": share, "dtype": record.dtype, **facts}
                self._notes.add("lost_updates", record, attempt=seen[0], **more)


def holds_half(parameter: Tensor) -> bool:
    """Says whether a parameter has a gradient in half that is not 0."""
    grad = parameter.grad
    return grad is not None and grad.dtype in HALF_TYPES and bool(plain(grad).any())


def share_of(mask: Tensor, of: Tensor | None = None) -> float:
    """Returns the share of what is true, among what is true in another mask where there is one."""
    return mask.float().mean().item() if of is None else (mask & of).sum().item() / max(of.sum().item(), 1)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

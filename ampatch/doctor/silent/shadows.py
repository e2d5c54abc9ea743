"""Follows what half loses: an overflow or an underflow, with what float32 would have made of it.

Where an operation in half makes inf or zeros out of numbers of which float32 makes other ones, its result
gets a shadow: the same in float32. What takes it runs again on the shadow, until half and float32 agree
again (a clamp, the tanh of a large number, a mask: no fault) or half is finite and far from it: a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.values import holds_no_number, key_of, tensors_in
from ampatch.doctor.silent.fault import Notes

HALF = (torch.float16, torch.bfloat16)
DRAWS = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "bernoulli", "bernoulli_", "multinomial")
DRAWS += ("normal", "normal_", "uniform_", "rand_like", "randn_like", "rrelu", "gumbel_softmax")
FAR = 0.5  # of what float32 has
NEGLIGIBLE = 1e-6  # what half can hold but badly
MOST = 0.5  # of the numbers become zeros: an underflow
MANY = 0.25  # of the numbers are far from float32


@dataclass(frozen=True, slots=True)
class Operation:
    """A function of torch that is called, with the tensors that it takes and where it stands."""

    name: str
    func: Callable[..., object]
    args: tuple
    kwargs: dict[str, object]
    taken: list[Tensor]
    phase: str
    place: Place | None
    where: str | None


@dataclass(frozen=True, slots=True)
class Loss:
    """What half lost in an operation: `kind` is "zeros" after an overflow, else "underflow"."""

    kind: str
    op: str
    phase: str
    place: Place | None
    where: str | None
    numbers: dict[str, object] = field(default_factory=dict)


class Shadows:
    """The shadows of one attempt, and the faults that wait for a backward pass to reach them."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self.forget()

    def forget(self) -> None:
        """Begins with the next attempt."""
        self._shadows: dict[int, tuple[Tensor, Tensor, Loss]] = {}  # by id: in half, in float32, and why
        self._marks: dict[int, set[int]] = {}  # of storages: faults
        self._kept: list[Tensor] = []  # so that their addresses stay theirs
        self._faults: list[Loss] = []

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the faults that have reached the loss."""
        for index in sorted({mark for loss in losses for mark in self._marks.get(key_of(loss), ())}):
            it = self._faults[index]
            self._notes.add(it.kind, it.phase, it.where, it.op, it.place, **it.numbers)

    def prepare(self, operation: Operation) -> Operation | None:
        """Returns what is needed to repeat an operation; one that draws cannot be repeated."""
        if operation.name in DRAWS or not operation.taken:
            return None
        if not operation.name.endswith("_"):
            return operation
        copies: dict[int, Tensor] = {}

        def copy(value: object) -> object:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            copies[id(value)] = value.detach().clone()
            self._follow(value, copies[id(value)])
            return copies[id(value)]

        args, kwargs = tree_map(copy, operation.args), tree_map(copy, operation.kwargs)
        return Operation(
            operation.name, operation.func, args, kwargs, list(copies.values()), *place_of(operation)
        )

    def look(self, operation: Operation, given: list[Tensor]) -> None:
        """Looks at what an operation gives."""
        marks = {mark for tensor in operation.taken for mark in self._marks.get(key_of(tensor), ())}
        known = [self._shadows[id(it)] for it in operation.taken if id(it) in self._shadows]
        loss = known[0][2] if known else find_loss(operation, given)
        if loss is not None:
            wanted = self._repeat(operation)
            for tensor, expected in zip(given, wanted, strict=False):
                marks |= self._judge(tensor, expected, loss, is_new=not known)
        for tensor in given if marks else ():
            self._marks.setdefault(key_of(tensor), set()).update(marks)
            self._kept.append(tensor.detach())

    def _follow(self, before: Tensor, after: Tensor) -> None:
        if id(before) in self._shadows:
            _, shadow, loss = self._shadows[id(before)]
            self._shadows[id(after)] = after, shadow, loss

    def _repeat(self, operation: Operation) -> list[Tensor]:
        """Runs an operation in float32, on shadows where there are some; returns nothing if it cannot."""

        def widen(value: object) -> object:
            if isinstance(value, torch.dtype):
                return torch.float32 if value in HALF else value
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            shadow = self._shadows.get(id(value))
            return value.detach().to(torch.float32, copy=True) if shadow is None else shadow[1].clone()

        args, kwargs = tree_map(widen, operation.args), tree_map(widen, operation.kwargs)
        if operation.name in ("half", "bfloat16"):
            return [args[0]]
        try:
            return [it for it in tensors_in(operation.func(*args, **kwargs)) if it.is_floating_point()]
        except Exception:  # of a function that does not take float32, or counts its calls
            return []

    def _judge(self, tensor: Tensor, wanted: Tensor, loss: Loss, is_new: bool) -> set[int]:
        """Compares a result with its shadow; returns the mark of a fault."""
        self._shadows.pop(id(tensor), None)
        if tensor.shape != wanted.shape or tensor.layout is not torch.strided or not tensor.numel():
            return set()
        have, valid = tensor.detach().to(torch.float32), torch.isfinite(wanted)
        if torch.isnan(have).any():
            return set()  # that is no longer silent
        is_lost = valid & ~torch.isfinite(have)
        is_far = valid & ((have - wanted).abs() > FAR * wanted.abs())
        if is_new and loss.kind == "underflow" and is_far.float().mean() < MOST:
            return set()
        is_grave = is_far & ~is_lost & (wanted.abs() > NEGLIGIBLE)
        share = is_grave.float().mean().item()
        if share > 0 and (share >= MANY or loss.kind == "zeros") and not is_lost.any():
            zeros = (is_grave & (have == 0)).float().mean().item()
            first = wanted[is_grave].abs().max().item()
            numbers = {**loss.numbers, "share": share, "zeros": zeros, "float32_largest": first}
            self._faults.append(Loss(loss.kind, loss.op, loss.phase, loss.place, loss.where, numbers))
            return {len(self._faults) - 1}
        if is_far.any():
            self._shadows[id(tensor)] = tensor, wanted, loss
        return set()


def find_loss(operation: Operation, given: list[Tensor]) -> Loss | None:
    """Asks whether an operation may lose something in half: it makes inf of finite numbers, or zeros."""
    for tensor in given:
        if tensor.dtype not in HALF or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if not torch.isfinite(tensor).all():
            is_named = holds_no_number((operation.args, tuple(operation.kwargs.values())))
            if is_named or not all(bool(torch.isfinite(it).all()) for it in operation.taken):
                return None
            return new_loss("zeros", operation, tensor)
        if (tensor == 0).float().mean() >= MOST and any(bool(it.any()) for it in operation.taken):
            return new_loss("underflow", operation, tensor)
    return None


def new_loss(kind: str, operation: Operation, tensor: Tensor) -> Loss:
    """Describes what an operation loses."""
    largest = max(it.detach().abs().max().item() for it in operation.taken if it.numel())
    numbers = {"input_largest": largest, "dtype": str(tensor.dtype).removeprefix("torch.")}
    return Loss(kind, operation.name, *place_of(operation), numbers)


def place_of(operation: Operation) -> tuple[str, Place | None, str | None]:
    """Returns phase, place and line of an operation."""
    return operation.phase, operation.place, operation.where


def floating_in(value: object) -> list[Tensor]:
    """Returns the floating tensors in a value."""
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]

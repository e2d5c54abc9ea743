"""Follows what half loses: an overflow or an underflow, with what float32 would have made of it.

Where an operation in half makes inf or zeros out of numbers of which float32 makes other ones, its result
gets a shadow: the same in float32. The operations that follow run again on shadows, until half and float32
agree again (a clamp, the tanh of a large number, a mask: no fault) or half is finite and far off: a fault.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.marks import Marks
from ampatch.doctor.instruments.places import is_called_by_scaler
from ampatch.doctor.instruments.region import region_of
from ampatch.doctor.instruments.values import floating_in, holds_no_number, is_finite
from ampatch.doctor.silent.notes import Notes, Suspicion
from ampatch.doctor.silent.rules import SilentRule
from ampatch.levels.precision import HALF_TYPES

DRAWS = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "bernoulli", "bernoulli_", "multinomial")
DRAWS += ("normal", "normal_", "uniform_", "rand_like", "randn_like", "rrelu", "gumbel_softmax")
FAR = 0.5  # of what float32 has
NEGLIGIBLE = 1e-6  # what half can hold but badly
MOST = 0.5  # of the numbers become zeros: an underflow
MANY = 0.25  # of the numbers are far from float32


@dataclass(frozen=True, slots=True)
class Shadow:
    """What float32 has in the place of a tensor, as long as nobody writes to that."""

    version: int
    wanted: Tensor
    loss: Suspicion  # "zeros" after an overflow, else "underflow"


class Shadows(SilentRule):
    """The shadows of one attempt, and the faults that wait for a backward pass to reach them."""

    def __init__(self, clock: Clock, notes: Notes, window: Collection[int]) -> None:
        self._mends: dict[str | None, dict[str, object]] = {}  # by line
        super().__init__(clock, notes, window)

    def forget(self) -> None:
        self._shadows = WeakTensorKeyDictionary()
        self._marks, self._faults = Marks(), list[Suspicion]()

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Notes the faults that have reached the loss."""
        for index in sorted(self._marks.of(*losses)):
            self._notes.confirm(self._faults[index])

    def before(self, operation: Operation) -> Operation | None:
        """Returns what is needed to repeat an operation on numbers; one that draws cannot be repeated."""
        if operation.name in DRAWS or not any(tensor.numel() for tensor in operation.floating):
            return None
        if not operation.name.endswith("_"):
            return operation

        def copy(value: object) -> object:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            copied = value.detach().clone()
            if (known := self._find(value)) is not None:
                self._add(copied, known.wanted, known.loss)
            return copied

        args, kwargs = tree_map(copy, operation.args), tree_map(copy, operation.kwargs)
        return replace(operation, args=args, kwargs=kwargs, taken=floating_in((args, kwargs)))

    def look(self, operation: Operation, repeated: Operation | None, given: list[Tensor]) -> None:
        """Looks at what an operation gives; `repeated` is what `before` made of it."""
        marks = self._marks.of(*operation.floating)
        if repeated is not None:
            known = [it for it in map(self._find, repeated.floating) if it is not None]
            loss = known[0].loss if known else self._find_loss(repeated, given)
            # A scaler scales the loss, not what was lost: its gradient is none of these zeros.
            wanted = [] if loss is None or (known and is_called_by_scaler()) else self._repeat(repeated)
            for tensor, expected in zip(given, wanted, strict=False):
                marks |= self._judge(tensor, expected, loss, is_new=not known)
        for tensor in given if marks else ():
            self._marks.add(tensor, marks)

    def _find_loss(self, operation: Operation, given: list[Tensor]) -> Suspicion | None:
        """Asks whether an operation loses something, and how its statement reads in float32."""
        loss, where = find_loss(operation, given), operation.where
        if loss is not None and where not in self._mends:
            self._mends[where] = {
                "region": region_of(operation, self.clock.models.parameters()),
                "autocast": operation.autocast,
                "float32_survives": True,
                "alike": self.clock.models.like_place(),
            }
        if loss is None:
            return None
        more = dict(self._mends[where])
        facts = {"own": True, "alike": more.pop("alike")}
        return replace(loss, numbers=loss.numbers | facts, more=loss.more | more)

    def _find(self, tensor: Tensor) -> Shadow | None:
        """Returns the shadow of a tensor, None of one that was written to since, as through a view."""
        known = self._shadows.get(tensor)
        return known if known is not None and known.version == version_of(tensor) else None

    def _add(self, tensor: Tensor, wanted: Tensor, loss: Suspicion) -> None:
        self._shadows[tensor] = Shadow(version_of(tensor), wanted, loss)

    def _repeat(self, operation: Operation) -> list[Tensor]:
        """Runs an operation in float32, on shadows where there are some; returns nothing if it cannot."""

        def widen(value: object) -> object:
            if isinstance(value, torch.dtype):
                return torch.float32 if value in HALF_TYPES else value
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            known = self._find(value)
            return (value if known is None else known.wanted).detach().to(torch.float32, copy=True)

        args, kwargs = tree_map(widen, operation.args), tree_map(widen, operation.kwargs)
        if operation.name in ("half", "bfloat16"):
            return [args[0]]
        try:
            device = operation.floating[0].device
            devices = [device] if device.type == "cuda" else []
            with torch.autocast(device.type, enabled=False), torch.random.fork_rng(devices):
                made = operation.func(*args, **kwargs)
        except Exception:  # of a function that does not take float32, or counts its calls
            return []
        return floating_in(args[0] if operation.name.endswith("_") else made)

    def _judge(self, tensor: Tensor, wanted: Tensor, loss: Suspicion, is_new: bool) -> set[int]:
        """Compares a result with its shadow; returns the mark of a fault."""
        self._shadows.pop(tensor, None)
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
            kind = "zeros" if is_new else loss.kind  # what one operation loses alone, it lost inside
            self._faults.append(replace(loss, kind=kind, numbers=numbers))
            return {len(self._faults) - 1}
        if is_far.any():
            self._add(tensor, wanted, loss)
        return set()


def find_loss(operation: Operation, given: list[Tensor]) -> Suspicion | None:
    """Asks whether an operation may lose something in half: it makes inf of finite numbers, or zeros."""
    for tensor in given:
        if tensor.dtype not in HALF_TYPES or tensor.layout is not torch.strided or not tensor.numel():
            continue
        if not torch.isfinite(tensor).all():
            if holds_no_number(operation.arguments) or not all(map(is_finite, operation.floating)):
                return None
            return new_loss("zeros", operation, tensor)
        if (tensor == 0).float().mean() >= MOST and any(bool(it.any()) for it in operation.floating):
            return new_loss("underflow", operation, tensor)
    return None


def new_loss(kind: str, operation: Operation, tensor: Tensor) -> Suspicion:
    """Describes what an operation loses."""
    largest = max(it.detach().abs().max().item() for it in operation.floating if it.numel())
    more = {"input_largest": largest, "dtype": str(tensor.dtype).removeprefix("torch.")}
    return Suspicion(kind, operation.site, more=more)


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version

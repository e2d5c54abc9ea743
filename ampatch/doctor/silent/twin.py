"""The float32 twin of operations in half: what they make of the same numbers, and what comes of that.

Where an operation in half makes inf or zeros out of numbers of which float32 makes other ones, its result
gets a twin: the same in float32. The operations that follow run again on twins, until half and float32
agree again (a clamp, the tanh of a large number, a mask: no fault) or half is finite and far off: a fault.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.doctor.finding import Finding
from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.values import floating_in, holds_no_number, is_finite
from ampatch.levels.precision import HALF_TYPES

DRAWS = ("dropout", "dropout_", "alpha_dropout", "feature_dropout", "bernoulli", "bernoulli_", "multinomial")
DRAWS += ("normal", "normal_", "uniform_", "rand_like", "randn_like", "rrelu", "gumbel_softmax")
FAR = 0.5  # of what float32 has
NEGLIGIBLE = 1e-6  # what half can hold but badly
MOST = 0.5  # of the numbers become zeros: an underflow
MANY = 0.25  # of the numbers are far from float32


@dataclass(frozen=True, slots=True)
class Held:
    """What float32 has in the place of a tensor, as long as nobody writes to that, and why."""

    version: int
    wanted: Tensor
    loss: Finding | None = None  # "zeros" after an overflow, else "underflow"


class Twin:
    """The twins of what one attempt has made."""

    def __init__(self) -> None:
        self._held = WeakTensorKeyDictionary()

    def find(self, tensor: Tensor) -> Held | None:
        """Returns the twin of a tensor, None of one that was written to since, as through a view."""
        known = self._held.get(tensor)
        return known if known is not None and known.version == version_of(tensor) else None

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
            if (known := self.find(value)) is not None:
                self._held[copied] = replace(known, version=version_of(copied))
            return copied

        args, kwargs = tree_map(copy, operation.args), tree_map(copy, operation.kwargs)
        return replace(operation, args=args, kwargs=kwargs, inputs=floating_in((args, kwargs)))

    def repeat(self, operation: Operation) -> list[Tensor]:
        """Runs an operation in float32, on twins where there are some; returns nothing if it cannot."""

        def widen(value: object) -> object:
            if isinstance(value, torch.dtype):
                return torch.float32 if value in HALF_TYPES else value
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            known = self.find(value)
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
        return floating_in(args[:1] if operation.name.endswith("_") else made)

    def hold(self, tensor: Tensor, wanted: Tensor, loss: Finding | None = None) -> None:
        self._held[tensor] = Held(version_of(tensor), wanted, loss)

    def judge(self, tensor: Tensor, wanted: Tensor, loss: Finding, is_new: bool) -> Finding | None:
        """Compares a result with its twin, and keeps that where it is needed; returns a fault."""
        self._held.pop(tensor, None)
        if tensor.shape != wanted.shape or tensor.layout is not torch.strided or not tensor.numel():
            return None
        have, valid = tensor.detach().to(torch.float32), torch.isfinite(wanted)
        if torch.isnan(have).any():
            return None  # that is no longer silent
        is_lost = valid & ~torch.isfinite(have)
        is_far = valid & ((have - wanted).abs() > FAR * wanted.abs())
        if is_new and loss.kind == "underflow" and is_far.float().mean() < MOST:
            return None
        is_grave = is_far & ~is_lost & (wanted.abs() > NEGLIGIBLE)
        share = is_grave.float().mean().item()
        if share > 0 and (share >= MANY or loss.kind == "zeros") and not is_lost.any():
            zeros = (is_grave & (have == 0)).float().mean().item()
            numbers = {"share": share, "zeros": zeros, "float32_largest": wanted[is_grave].abs().max().item()}
            kind = "zeros" if is_new else loss.kind  # what one operation loses alone, it lost inside
            return replace(loss, kind=kind, facts=loss.facts | numbers)
        if is_far.any():
            self.hold(tensor, wanted, loss)
        return None


def find_loss(operation: Operation) -> tuple[str, float, str] | None:
    """Asks whether an operation may lose something in half: it makes inf of finite numbers, or zeros.

    Returns the kind, the largest number that it takes, and the type.
    """
    for tensor in operation.outputs:
        if tensor.dtype not in HALF_TYPES or tensor.layout is not torch.strided or not tensor.numel():
            continue
        kind = "zeros"
        if torch.isfinite(tensor).all():
            kind = "underflow"
            if (tensor == 0).float().mean() < MOST or not any(
                bool(tensor.any()) for tensor in operation.floating
            ):
                continue
        elif holds_no_number(operation.arguments) or not all(map(is_finite, operation.floating)):
            return None
        largest = max(tensor.detach().abs().max().item() for tensor in operation.floating if tensor.numel())
        return kind, largest, str(tensor.dtype).removeprefix("torch.")
    return None


def version_of(tensor: Tensor) -> int:
    """Returns how often a tensor was written to; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version

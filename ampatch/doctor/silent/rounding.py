"""The float32 shadow of a whole forward: which operation rounds away by what its numbers differ.

In some attempts each operation runs again in float32, on what float32 has made so far. What it gives in half
is compared with that by how much its numbers differ: `a**2 + b**2 - 2 * a * b` is large terms that nearly
cancel, and `20 + x` has the digits of 20.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ampatch.doctor.instruments.dispatch import Operation
from ampatch.doctor.instruments.values import plain
from ampatch.doctor.silent.twin import Twin

FEWEST = 8  # numbers of a tensor, below which it says nothing
LEAST = 0.01  # which half rounds anyway
SAME = 1e-5  # of their size, by which numbers differ that are the same


class Rounding:
    """The shadow of what one attempt has made, and how far that is off."""

    def __init__(self) -> None:
        self._twin, self._errors = Twin(), WeakTensorKeyDictionary()

    def before(self, operation: Operation) -> Operation | None:
        return self._twin.before(operation)

    def follow(self, operation: Operation, repeated: Operation) -> tuple[float, float]:
        """Runs an operation in float32; returns how far it is off in half, and times that of what it took."""
        before = max((self._errors.get(tensor, 0.0) for tensor in operation.floating), default=0.0)
        worst = 0.0
        for tensor, wanted in zip(repeated.outputs, self._twin.repeat(repeated), strict=False):
            if tensor.shape != wanted.shape or tensor.layout is not torch.strided:
                continue
            self._twin.hold(tensor, wanted)
            self._errors[tensor] = error = error_of(plain(tensor), wanted)
            worst = max(worst, error if tensor.numel() >= FEWEST else 0.0)
        return worst, worst / max(before, LEAST)


def error_of(have: Tensor, wanted: Tensor) -> float:
    """Returns how far numbers are off, beside how much they differ, in each column of a table.

    >>> error_of(torch.tensor([20.0, 20.0]), torch.tensor([20.05, 19.95])) > 0.99
    True
    """
    difference = have.float() - wanted
    valid = torch.isfinite(difference)
    wanted, difference = wanted.where(valid, 0), difference.where(valid, 0)
    if not wanted.numel():
        return 0.0
    mean = wanted.flatten(0, -2).mean(0) if wanted.dim() > 1 else wanted.mean()
    spread = (wanted - mean).norm().item()
    if spread <= SAME * wanted.norm().item():
        return 0.0
    return difference.norm().item() / spread

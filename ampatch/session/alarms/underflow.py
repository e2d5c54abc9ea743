"""How many gradients float16 rounds to zero, or nearly so, at a loss scale: a count of their exponents."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Exponents as `torch.frexp` has them: of 2**-14, the smallest normal number, and of 2**-25, below which
# float16 rounds to 0.
SMALLEST_NORMAL, ZERO = -13, -24


@dataclass(frozen=True, slots=True)
class Underflow:
    """Shares, from 0 to 1, of gradient values: `zero` are 0, `subnormal` have lost digits."""

    count: int
    zero: float
    subnormal: float

    def __str__(self) -> str:
        return (
            f"of {self.count} gradient values {self.zero:.1%} are 0 and {self.subnormal:.1%} so small that "
            f"float16 rounds them coarsely"
        )


@torch.no_grad()
def count_underflow(grads: Iterable[tuple[Tensor, float]]) -> Underflow | None:
    """Counts gradients by exponent, each given with the factor that makes it what float16 held.

    Of no gradients at all, or where none is finite, None. One host sync for each device.
    """
    totals: dict[torch.device, Tensor] = {}
    for grad, factor in grads:
        values = grad._values() if grad.is_sparse else grad
        finite = values[torch.isfinite(values)].float()
        exponents = torch.frexp(finite).exponent + math.frexp(factor)[1] - 1
        is_zero = (finite == 0) | (exponents < ZERO)
        is_small = ~is_zero & (exponents < SMALLEST_NORMAL)
        numbers = torch.stack([is_zero.sum(), is_small.sum(), torch.full_like(is_zero.sum(), finite.numel())])
        totals[grad.device] = totals.get(grad.device, 0) + numbers
    zero, small, count = map(sum, zip((0, 0, 0), *(one.tolist() for one in totals.values()), strict=True))
    return Underflow(count, zero / count, small / count) if count else None

"""How many gradients float16 rounds to zero, or nearly so, at a loss scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ampatch.session.post_mortem.measure import find_values

SMALLEST_NORMAL, ZERO = 2.0**-14, 2.0**-25  # of float16: what is below has fewer digits, or rounds to 0


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
    """Counts gradients by size, each given with the factor that makes it what float16 held.

    Of no gradients at all, or where none is finite, None. Some host syncs.
    """
    totals: dict[torch.device, Tensor] = {}
    for grad, factor in grads:
        values = find_values(grad)
        if values is None:
            continue
        sizes = values[torch.isfinite(values)].abs().float() * factor
        is_zero = sizes <= ZERO
        is_small = ~is_zero & (sizes < SMALLEST_NORMAL)
        numbers = torch.stack([is_zero.sum(), is_small.sum(), torch.full_like(is_zero.sum(), sizes.numel())])
        totals[grad.device] = totals.get(grad.device, 0) + numbers
    zero, small, count = map(sum, zip((0, 0, 0), *(one.tolist() for one in totals.values()), strict=True))
    return Underflow(count, zero / count, small / count) if count else None

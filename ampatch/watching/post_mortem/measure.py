"""What there is to say about tensors in few numbers: ranges, what is not finite, what float16 loses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

Facts = dict[str, object]
SMALLEST_NORMAL, ZERO = 2.0**-14, 2.0**-25  # of float16: what is below has fewer digits, or rounds to 0


def find_values(tensor: Tensor) -> Tensor | None:
    """Returns the values that this process holds: local ones of a DTensor, those of a sparse tensor.

    None for tensors of which nobody knows that looking at them asks no other rank.
    """
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor._values()
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if not is_plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return None
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@torch.no_grad()
def measure(name: str, tensor: Tensor) -> Facts:
    """Returns the facts of a tensor; some host syncs.

    `least` and `largest` are those of the finite values; `sample` is the first index along the first
    dimension that holds inf or NaN.
    """
    facts: Facts = {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
    }
    values = find_values(tensor)
    if values is None or not values.numel():
        return facts
    if not values.is_floating_point():
        least, largest = torch.aminmax(values.byte() if values.dtype is torch.bool else values)
        return facts | {"least": least.item(), "largest": largest.item()}
    values = values.float() if values.element_size() == 1 else values
    least, largest = torch.aminmax(values)  # NaN if there is one
    if bool(torch.isfinite(least) & torch.isfinite(largest)):
        return facts | {"least": least.item(), "largest": largest.item()}
    return facts | _measure_broken(values)


def _measure_broken(values: Tensor) -> Facts:
    broken = ~torch.isfinite(values)
    is_nan = torch.isnan(values)
    nans, broken_count = int(is_nan.sum()), int(broken.sum())
    facts: Facts = {"nan": nans, "inf": broken_count - nans}
    if values.dim():
        facts["sample"] = (
            int(broken.flatten(1).any(1).nonzero()[0]) if values.dim() > 1 else int(broken.nonzero()[0])
        )
    if broken_count < values.numel():
        least, largest = torch.aminmax(values[~broken])
        facts |= {"least": least.item(), "largest": largest.item()}
    return facts


def measure_all(named: Iterable[tuple[str, Tensor]], most: int) -> list[Facts]:
    """Returns the facts of tensors, of `most` at the most: those that are not finite come first."""
    found = [measure(name, tensor) for name, tensor in named]
    return sorted(found, key=lambda facts: not (facts.get("nan") or facts.get("inf")))[:most]


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

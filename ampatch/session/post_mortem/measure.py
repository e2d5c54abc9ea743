"""What there is to say about a tensor in few numbers: its range, and where it is not finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

Facts = dict[str, object]


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

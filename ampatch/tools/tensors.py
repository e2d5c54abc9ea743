"""Finds the tensors in what functions take and return, and reads many of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

import torch
from torch import Tensor


def tensors_in(value: object, depth: int = 6) -> Iterator[Tensor]:
    """Yields the tensors in a value: itself, or what sequences, mappings and dataclasses hold."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in fields(value)]
    else:
        parts = value if isinstance(value, (tuple, list)) else ()
    for part in parts if depth else ():
        yield from tensors_in(part, depth - 1)


def read_numbers(tensors: list[Tensor]) -> list[float]:
    """Returns the values of tensors of one number each, by one host sync."""
    if not tensors:
        return []
    # A copy to the processor that does not wait would be read before it is there.
    device = next((tensor.device for tensor in tensors if not tensor.is_cpu), tensors[0].device)
    parts = [tensor.detach().reshape(()).to(device, torch.float32, non_blocking=True) for tensor in tensors]
    return torch.stack(parts).tolist()

"""Norms of many tensors at once, accumulated in float32 whatever their type; no host sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

Kind = tuple[torch.device, torch.dtype, bool]


def kind_of(tensor: Tensor) -> Kind:
    """Returns what tensors must have in common for one foreach call."""
    return tensor.device, tensor.dtype, is_plain(tensor)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no subclass with rules of its own, such as a DTensor."""
    return type(tensor) in (Tensor, torch.nn.Parameter)


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that updates of tensors of a type are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Returns the norm of each tensor, 0-dimensional, in float32 (float64 for float64).

    Finite half values have a finite norm, though their squares may not be. The norm of an empty tensor
    is 0. A complex tensor counts as its real and imaginary parts.
    """
    found: list[Tensor | None] = [None] * len(tensors)
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    for index, tensor in enumerate(real):
        if tensor.numel():
            by_kind[kind_of(tensor)].append(index)
        else:  # has no infinity norm in torch
            found[index] = tensor.new_zeros((), dtype=compute_type(tensor.dtype))
    for (_, dtype, _), indices in by_kind.items():
        group = [real[index] for index in indices]
        for index, norm in zip(indices, _norms(group, order, compute_type(dtype)), strict=True):
            found[index] = norm
    return found  # type: ignore[return-value]


def _norms(tensors: list[Tensor], order: float, dtype: torch.dtype) -> Sequence[Tensor]:
    if is_plain(tensors[0]):
        return torch._foreach_norm(tensors, order, dtype=dtype)
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def total_norm(parts: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Returns the 2-norm of everything that the norms in `parts` are of: float32, 0-dimensional."""
    if not parts:
        return torch.zeros((), device=device)
    device = device or parts[0].device
    return torch.linalg.vector_norm(torch.stack([part.to(device, torch.float32) for part in parts]))


def are_finite(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns whether no element is inf or NaN, as a tensor; None for no elements."""
    largest = norms([tensor for tensor in tensors if tensor.numel()], float("inf"))
    if not largest:
        return None
    device = largest[0].device
    return torch.stack([norm.to(device, torch.float32).isfinite() for norm in largest]).all()

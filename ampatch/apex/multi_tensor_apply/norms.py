"""Norms of many tensors at once, accumulated in float32 whatever their type; no host sync."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.steps.masters import is_wrapper

Kind = tuple[torch.device, torch.dtype, bool]


def kind_of(tensor: Tensor) -> Kind:
    """Returns what tensors must have in common for one foreach call."""
    return tensor.device, tensor.dtype, is_wrapper(tensor)


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that updates of tensors of a type are computed in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """Returns the norm of each tensor, 0-dimensional, in float32 (float64 for float64).

    Finite half values have a finite norm, though their squares may not be. The norm of an empty tensor
    is 0. A complex tensor counts as its real and imaginary parts.
    """
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    result: list[Tensor | None] = [None] * len(real)
    by_kind: dict[Kind, list[int]] = defaultdict(list)
    for index, tensor in enumerate(real):
        if tensor.numel():
            by_kind[kind_of(tensor)].append(index)
        else:  # has no infinity norm in torch
            result[index] = tensor.new_zeros((), dtype=compute_type(tensor.dtype))
    for (_, dtype, is_wrapped), indices in by_kind.items():
        group, wide = [real[index] for index in indices], compute_type(dtype)
        if is_wrapped:
            group_norms = [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in group]
        else:
            group_norms = torch._foreach_norm(group, order, dtype=wide)
        for index, norm in zip(indices, group_norms, strict=True):
            result[index] = norm
    return result  # type: ignore[return-value]


def total_norm(parts: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Returns the 2-norm of everything that the norms in `parts` are of: float32, 0-dimensional."""
    if not parts:
        return torch.zeros((), device=device)
    device = device or parts[0].device
    return torch.linalg.vector_norm(torch.stack([part.to(device, torch.float32) for part in parts]))


def clip_divisor(grads: Sequence[Tensor], max_norm: float | Tensor | None) -> Tensor | None:
    """Returns what gradients are divided by for a norm of at most `max_norm`; None for no clipping."""
    if max_norm is None or (not isinstance(max_norm, Tensor) and max_norm <= 0):
        return None
    return (total_norm(norms(grads)) / max_norm).clamp(min=1.0)

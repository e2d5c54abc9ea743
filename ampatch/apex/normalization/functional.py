"""Layer and RMS normalization as functions, with input and weights of different types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

import ampatch as amp
from ampatch.apex.halves import HALF_TYPES

Shape = int | Sequence[int]

# At O1 and O4 the casts of a session make everything float32, as they do for F.layer_norm. The
# arguments after `eps` are there for apex's signatures: `memory_efficient` changes no result.


def _as_shape(normalized_shape: Shape) -> list[int]:
    is_whole = isinstance(normalized_shape, int)
    return [normalized_shape] if is_whole else list(normalized_shape)  # type: ignore[list-item, arg-type]


def _widest(*tensors: Tensor | None) -> torch.dtype | None:
    """Returns the type to compute mixed types in; None if there is one only."""
    types = {tensor.dtype for tensor in tensors if tensor is not None}
    if len(types) == 1:
        return None
    widest = torch.float32
    for dtype in types:
        widest = torch.promote_types(widest, dtype)
    return widest


def _cast(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _layer_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float, dtype: torch.dtype
) -> Tensor:
    wide = _widest(input, weight, bias)
    if wide is not None:
        input, weight, bias = input.to(wide), _cast(weight, wide), _cast(bias, wide)
    output = F.layer_norm(input, _as_shape(shape), weight, bias, eps)
    return output if wide is None else output.to(dtype)


def _rms_norm(input: Tensor, weight: Tensor | None, shape: Shape, eps: float, dtype: torch.dtype) -> Tensor:
    wide = _widest(input, weight)
    if wide is not None:
        input, weight = input.to(wide), _cast(weight, wide)
    output = F.rms_norm(input, _as_shape(shape), weight, eps)
    return output if wide is None else output.to(dtype)


@amp.float_function
def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.layer_norm in the type of the input."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, input.dtype)


@amp.float_function
def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns F.layer_norm without weights."""
    return _layer_norm(input, None, None, normalized_shape, eps, input.dtype)


@amp.float_function
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.layer_norm in the type of the weight."""
    return _layer_norm(input, weight, bias, normalized_shape, eps, weight.dtype)


@amp.float_function
def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.rms_norm in the type of the input."""
    return _rms_norm(input, weight, normalized_shape, eps, input.dtype)


@amp.float_function
def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Returns F.rms_norm without a weight."""
    return _rms_norm(input, None, normalized_shape, eps, input.dtype)


@amp.float_function
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Returns F.rms_norm in the type of the weight."""
    return _rms_norm(input, weight, normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS normalization in float32, or in the type of a half weight."""
    dims = tuple(range(-len(_as_shape(normalized_shape)), 0))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    normalized = input * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return normalized
    is_half = weight.dtype in HALF_TYPES
    return weight * (normalized.to(weight.dtype) if is_half else normalized)

"""FusedLayerNorm and FusedRMSNorm: torch's own normalizations, which also take mixed types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampatch as amp
from ampatch.levels.precision import HALF_TYPES

__all__ = [
    *("FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"),
    *("FusedLayerNormFunction", "FusedLayerNormAffineFunction", "FusedLayerNormAffineMixedDtypesFunction"),
    *("FusedRMSNormFunction", "FusedRMSNormAffineFunction", "FusedRMSNormAffineMixedDtypesFunction"),
    *("fused_layer_norm", "fused_layer_norm_affine", "mixed_dtype_fused_layer_norm_affine"),
    *("fused_rms_norm", "fused_rms_norm_affine", "mixed_dtype_fused_rms_norm_affine", "manual_rms_norm"),
]

Shape = int | Sequence[int]


# ---- Functions ----

# At O1 and O4 the casts of a session make everything float32, as they do for F.layer_norm. The
# arguments after `eps` are there for apex's signatures: `memory_efficient` changes no result.


def _normalize(
    function: Callable[..., Tensor],
    input: Tensor,
    weights: Sequence[Tensor | None],
    normalized_shape: Shape,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Calls a normalization of torch; mixed types are computed in the widest, at least float32."""
    shape = _as_shape(normalized_shape)
    types = {tensor.dtype for tensor in (input, *weights) if tensor is not None}
    if len(types) == 1:
        return function(input, shape, *weights, eps)
    wide = torch.float32
    for each in types:
        wide = torch.promote_types(wide, each)
    weights = [None if weight is None else weight.to(wide) for weight in weights]
    return function(input.to(wide), shape, *weights, eps).to(dtype)


def _as_shape(normalized_shape: Shape) -> list[int]:
    is_whole = isinstance(normalized_shape, int)
    return [normalized_shape] if is_whole else list(normalized_shape)  # type: ignore[list-item, arg-type]


@amp.float_function
def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return _normalize(F.layer_norm, input, (weight, bias), normalized_shape, eps, input.dtype)


@amp.float_function
def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return _normalize(F.layer_norm, input, (None, None), normalized_shape, eps, input.dtype)


@amp.float_function
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return _normalize(F.layer_norm, input, (weight, bias), normalized_shape, eps, weight.dtype)


@amp.float_function
def fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return _normalize(F.rms_norm, input, (weight,), normalized_shape, eps, input.dtype)


@amp.float_function
def fused_rms_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    return _normalize(F.rms_norm, input, (None,), normalized_shape, eps, input.dtype)


@amp.float_function
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    return _normalize(F.rms_norm, input, (weight,), normalized_shape, eps, weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:
    """Returns the RMS normalization in float32, or in the type of a half weight."""
    dims = tuple(range(-len(_as_shape(normalized_shape)), 0))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    normalized = input * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)
    if weight is None:
        return normalized
    is_half = weight.dtype in HALF_TYPES
    return weight * (normalized.to(weight.dtype) if is_half else normalized)


# Have the `apply` of an autograd function of apex's, and no more: torch knows the gradients.
FusedLayerNormFunction = SimpleNamespace(apply=fused_layer_norm)
FusedLayerNormAffineFunction = SimpleNamespace(apply=fused_layer_norm_affine)
FusedLayerNormAffineMixedDtypesFunction = SimpleNamespace(apply=mixed_dtype_fused_layer_norm_affine)
FusedRMSNormFunction = SimpleNamespace(apply=fused_rms_norm)
FusedRMSNormAffineFunction = SimpleNamespace(apply=fused_rms_norm_affine)
FusedRMSNormAffineMixedDtypesFunction = SimpleNamespace(apply=mixed_dtype_fused_rms_norm_affine)


# ---- Modules ----
# Their functions are looked up at each call: a script may have replaced them here.


class _TakesMemoryEfficient(nn.Module):
    """Takes `memory_efficient`: the results are the same, and it saves nothing here."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class FusedLayerNorm(_TakesMemoryEfficient, nn.LayerNorm):
    """nn.LayerNorm whose output has the type of its input, whatever type its weights have."""

    _function = staticmethod(lambda *args: fused_layer_norm_affine(*args))

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_TakesMemoryEfficient, nn.RMSNorm):
    """nn.RMSNorm whose output has the type of its input, whatever type its weight has."""

    _function = staticmethod(lambda *args: fused_rms_norm_affine(*args))

    def forward(self, input: Tensor) -> Tensor:
        return self._function(input, self.weight, self.normalized_shape, self.eps)


class _AlwaysAffine(nn.Module):
    """Takes no `elementwise_affine=False`: the weight decides the type of the output."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        memory_efficient: bool = False,
        elementwise_affine: bool = True,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise amp.AmpValueError(
                f"{name} does not support elementwise_affine=False: its weight decides the type of its "
                f"output; use {name.removeprefix('Mixed')}"
            )
        super().__init__(normalized_shape, eps, True, memory_efficient)


class MixedFusedLayerNorm(_AlwaysAffine, FusedLayerNorm):
    """A FusedLayerNorm whose output has the type of its weight. It always has one."""

    _function = staticmethod(lambda *args: mixed_dtype_fused_layer_norm_affine(*args))


class MixedFusedRMSNorm(_AlwaysAffine, FusedRMSNorm):
    """A FusedRMSNorm whose output has the type of its weight. It always has one."""

    _function = staticmethod(lambda *args: mixed_dtype_fused_rms_norm_affine(*args))

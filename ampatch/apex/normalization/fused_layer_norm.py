"""FusedLayerNorm and FusedRMSNorm: torch's own normalizations, which also take mixed types."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

import ampatch as amp
from ampatch.apex.normalization.functional import (
    Shape,
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    manual_rms_norm,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)
from ampatch.apex.normalization.functions import (
    FusedLayerNormAffineFunction,
    FusedLayerNormAffineMixedDtypesFunction,
    FusedLayerNormFunction,
    FusedRMSNormAffineFunction,
    FusedRMSNormAffineMixedDtypesFunction,
    FusedRMSNormFunction,
)

__all__ = [
    "FusedLayerNorm",
    "FusedLayerNormAffineFunction",
    "FusedLayerNormAffineMixedDtypesFunction",
    "FusedLayerNormFunction",
    "FusedRMSNorm",
    "FusedRMSNormAffineFunction",
    "FusedRMSNormAffineMixedDtypesFunction",
    "FusedRMSNormFunction",
    "MixedFusedLayerNorm",
    "MixedFusedRMSNorm",
    "fused_layer_norm",
    "fused_layer_norm_affine",
    "fused_rms_norm",
    "fused_rms_norm_affine",
    "manual_rms_norm",
    "mixed_dtype_fused_layer_norm_affine",
    "mixed_dtype_fused_rms_norm_affine",
]


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

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions of the input."""
        if self.weight is None:
            return fused_layer_norm(input, self.normalized_shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_TakesMemoryEfficient, nn.RMSNorm):
    """nn.RMSNorm whose output has the type of its input, whatever type its weight has."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions of the input."""
        if self.weight is None:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """A FusedLayerNorm whose output has the type of its weight. It always has one."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: object
    ) -> None:
        _check_affine("MixedFusedLayerNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions of the input."""
        return mixed_dtype_fused_layer_norm_affine(
            input, self.weight, self.bias, self.normalized_shape, self.eps
        )


class MixedFusedRMSNorm(FusedRMSNorm):
    """A FusedRMSNorm whose output has the type of its weight. It always has one."""

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: object
    ) -> None:
        _check_affine("MixedFusedRMSNorm", kwargs)
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:
        """Normalizes the last dimensions of the input."""
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


def _check_affine(name: str, kwargs: dict[str, object]) -> None:
    is_affine = kwargs.pop("elementwise_affine", True)
    unknown: Sequence[str] = sorted(kwargs)
    if unknown:
        raise amp.AmpTypeError(f"{name}: unknown argument {', '.join(map(repr, unknown))}")
    if not is_affine:
        raise amp.AmpValueError(
            f"{name} does not support elementwise_affine=False: its weight decides the type of its output; "
            f"use {name.removeprefix('Mixed')}"
        )

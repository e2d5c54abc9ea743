"""Normalizations under the names of apex's autograd functions, for scripts that call their `apply`."""

from __future__ import annotations

from ampatch.apex.normalization.functional import (
    fused_layer_norm,
    fused_layer_norm_affine,
    fused_rms_norm,
    fused_rms_norm_affine,
    mixed_dtype_fused_layer_norm_affine,
    mixed_dtype_fused_rms_norm_affine,
)

# Torch knows the gradients: these are no autograd functions of their own.


class FusedLayerNormFunction:
    """`apply(input, normalized_shape, eps)`."""

    apply = staticmethod(fused_layer_norm)


class FusedLayerNormAffineFunction:
    """`apply(input, weight, bias, normalized_shape, eps)`, in the type of the input."""

    apply = staticmethod(fused_layer_norm_affine)


class FusedLayerNormAffineMixedDtypesFunction:
    """`apply(input, weight, bias, normalized_shape, eps)`, in the type of the weight."""

    apply = staticmethod(mixed_dtype_fused_layer_norm_affine)


class FusedRMSNormFunction:
    """`apply(input, normalized_shape, eps)`."""

    apply = staticmethod(fused_rms_norm)


class FusedRMSNormAffineFunction:
    """`apply(input, weight, normalized_shape, eps)`, in the type of the input."""

    apply = staticmethod(fused_rms_norm_affine)


class FusedRMSNormAffineMixedDtypesFunction:
    """`apply(input, weight, normalized_shape, eps)`, in the type of the weight."""

    apply = staticmethod(mixed_dtype_fused_rms_norm_affine)

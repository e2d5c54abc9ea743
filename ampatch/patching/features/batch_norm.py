"""Lets torch.func and forward-mode AD differentiate a BatchNorm with float32 weights and half input."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.private import forward_ad_level, is_transformed
from ampatch.patching.features.scripting import StandsFor
from ampatch.patching.patcher import Patcher

Function = Callable[..., object]


def patch_batch_norm(patcher: Patcher) -> None:
    """Has `batch_norm` compute in float32 inside of a transform, and return the type of its input.

    Its kernels take half input with float32 weights, but the formulas that torch has for `vmap`, `jvp` and
    the derivatives of a derivative do not: they raise, or return float32.
    """
    functional = torch.nn.functional
    patcher.replace(functional, "batch_norm", _widen_in_transforms(functional.batch_norm))


def _widen_in_transforms(original: Function) -> Function:
    @functools.wraps(original)
    def batch_norm(input: Tensor, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_dynamo_compiling() or not _is_transformed():
            return original(input, *args, **kwargs)
        if input.dtype not in HALF_TYPES or not _has_float32((*args, *kwargs.values())):
            return original(input, *args, **kwargs)
        return original(input.float(), *args, **kwargs).to(input.dtype)

    # TorchScript reads the source of a Python function.
    batch_norm.__prepare_scriptable__ = StandsFor(original)  # type: ignore[attr-defined]
    return batch_norm


def _is_transformed() -> bool:
    return is_transformed() or forward_ad_level() >= 0


def _has_float32(values: tuple) -> bool:
    return any(isinstance(value, Tensor) and value.dtype is torch.float32 for value in values)

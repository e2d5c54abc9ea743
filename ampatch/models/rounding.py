"""What rounding to half does to numbers that no step trains: positions, frequencies, physical units."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import Enum

import torch
from torch import Tensor

from ampatch.steps.masters import is_wrapper

LARGEST_ERROR = 1 / 32  # of an angle in rad or a pixel: bfloat16 makes it at 16, float16 at 128
_RAMP = 8  # numbers that only rise or only fall are a table, and no chance
_PIXEL = 1 / 1024  # of a grid from -1 to 1, with 2048 of them
_LARGEST = torch.finfo(torch.float16).max
_LIMIT = 1e9  # that nothing reaches, and inf does as well; as -inf for what masks add to scores
_NEGLIGIBLE = 2.0**-11  # beside the largest number: half loses it in their sum


class Effect(Enum):
    """What half does to numbers; its value says so after "which"."""

    INF = "makes inf of a number"
    STEPS = "moves its steps: positions, frequencies or noise levels from it are wrong"
    ZERO = "makes 0 of a number"
    OFF = f"moves a number by more than 1/{1 / LARGEST_ERROR:.0f}: an angle, a position or a count is wrong"


def find_effect(name: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Effect | None:
    """Returns what half does to one of a module's tensors that no step trains, None where it does no harm.

    Pretrained weights that are frozen are not looked at for single numbers: they are no angles.
    """
    tensor = tensors[name]
    if tensor.requires_grad or not tensor.numel() or not _has_values(tensor):
        return None
    values = tensor.detach()
    half = values.to(dtype).float()
    if torch.equal(half, values) or _is_bound(values):
        return None
    checks = {Effect.INF: _is_inf, Effect.STEPS: _loses_steps}
    if not isinstance(tensor, torch.nn.Parameter):
        checks |= {Effect.ZERO: _is_zero, Effect.OFF: functools.partial(_is_off, _find_spread(name, tensors))}
    return next((effect for effect, holds in checks.items() if holds(values, half)), None)


def find_error(precise: Tensor, half: Tensor) -> float:
    """Returns how far half moves what a module has computed, 0.0 where that does no harm."""
    if not precise.numel() or not _has_values(precise) or _is_bound(precise.detach()):
        return 0.0
    wide = half.detach().float()
    error = torch.where(precise.isfinite(), (wide - precise.detach()).abs(), 0).max().item()
    return error if error > LARGEST_ERROR else 0.0


def _has_values(tensor: Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not (tensor.is_meta or is_wrapper(tensor))


def _is_bound(values: Tensor) -> bool:
    """Whether all numbers are 0 or one that is there as good as endless: a mask, or a limit."""
    low, high = values.amin(), values.amax()
    bound = torch.where(low < 0, low, high)
    is_far = (bound < -_LARGEST) | (bound >= _LIMIT)
    return bool(is_far & ((values == 0) | (values == bound)).all())


def _is_inf(values: Tensor, half: Tensor) -> bool:
    return bool((half.isinf() & values.isfinite()).any())


def _is_zero(values: Tensor, half: Tensor) -> bool:
    lost = torch.where(half == 0, values.abs(), 0).amax()
    return bool(lost > values.abs().amax() * _NEGLIGIBLE)


def _is_off(spread: Tensor | None, values: Tensor, half: Tensor) -> bool:
    """Whether a number moves too far; by how much a mean may move, its deviation says."""
    if values.numel() <= 4 and bool(values.abs().amax() <= 255):
        return False  # a mean or a deviation of pictures, a number a channel
    scale = 1 if spread is None or spread.shape != values.shape else spread.detach().float().clamp(min=1)
    return bool(((half - values).abs() > LARGEST_ERROR * scale).any())


def _find_spread(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """Finds the deviations that belong to means, by their name; deviations and variances are their own."""
    if "std" in name or "var" in name:
        return tensors[name]
    if "mean" not in name:
        return None
    variance = tensors.get(name.replace("mean", "var"))
    return tensors.get(name.replace("mean", "std")) if variance is None else variance.detach().float().sqrt()


def _loses_steps(values: Tensor, half: Tensor) -> bool:
    """Whether whole numbers move, or those of a table, or steps of a table with several lines are lost."""
    is_moved = (half != values) & (values.abs() <= _LARGEST)
    if bool((values == values.round()).all() & is_moved.any()):
        return True
    if values.numel() == max(values.shape, default=1) and _is_table(values.flatten(), 0):
        return True
    lines = [dim for dim, size in enumerate(values.shape) if size >= _RAMP]
    return any(_merges(values, half, dim) for dim in lines if _is_table(values, dim))


def _is_table(values: Tensor, dim: int) -> bool:
    """Whether all lines along a dimension only rise or only fall, but for some that stay as they are."""
    first = values.movedim(dim, -1)[(0,) * (values.dim() - 1)]
    if values.dim() > 1 and not (_is_table(first, 0) or bool((first == first[0]).all())):
        return False  # as of most, and soon seen
    signs, steps = values.diff(dim=dim).sign(), values.shape[dim] - 1
    is_ramp = signs.sum(dim).abs() == steps
    return values.shape[dim] >= _RAMP and bool((is_ramp | (signs == 0).all(dim)).all() & is_ramp.any())


def _merges(values: Tensor, half: Tensor, dim: int) -> bool:
    """Whether two numbers become one that are as far apart as the pixels of a grid; sines may be closer."""
    return bool(((half.diff(dim=dim) == 0) & (values.diff(dim=dim).abs() >= _PIXEL)).any())

"""What `amp_C` resolves to: functions on lists of tensors, on torch's foreach functions.

They write past autograd, as a kernel does: results go into live leaf parameters without a graph and
without a version, also between types. Computed is in float32, or float64 where a tensor is. The flag
is set in place on its device, never read: no host sync. `chunk_size` has no meaning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.kernels import check_lists, past_autograd, set_flag_, widen, write_
from ampatch.apex.multi_tensor_apply.norms import are_finite, norms, total_norm
from ampatch.apex.multi_tensor_apply.optimizer_kernels import (
    multi_tensor_adagrad,
    multi_tensor_adam,
    multi_tensor_lamb,
    multi_tensor_lamb_stage1_cuda,
    multi_tensor_lamb_stage2_cuda,
    multi_tensor_novograd,
    multi_tensor_sgd,
)

__all__ = [
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_unscale_l2norm",
    "multi_tensor_adam",
    "multi_tensor_adagrad",
    "multi_tensor_sgd",
    "multi_tensor_lamb",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_novograd",
    "update_scale_hysteresis",
]

TensorLists = Sequence[Sequence[Tensor]]


@past_autograd
def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor | None, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Writes each tensor of the first list, times `scale`, into that of the second.

    Sets the flag to 1 if an input is inf or NaN.
    """
    sources, targets = check_lists("multi_tensor_scale", tensor_lists, 2)
    set_flag_(noop_flag, are_finite(sources))
    write_(targets, _multiply(sources, scale))


@past_autograd
def multi_tensor_axpby(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    a: float,
    b: float,
    arg_to_check: int = -1,
) -> None:
    """Writes a * x + b * y, for x, y of the first two lists, into the tensors of the third.

    Sets the flag to 1 if an x (`arg_to_check` 0), a y (1) or any of both (-1) is inf or NaN.
    """
    xs, ys, targets = check_lists("multi_tensor_axpby", tensor_lists, 3)
    checked = {0: xs, 1: ys, -1: [*xs, *ys]}.get(arg_to_check)
    if checked is None:
        raise amp.AmpValueError(
            f"multi_tensor_axpby: arg_to_check={arg_to_check!r}: expected 0 for x, 1 for y or -1 for both"
        )
    set_flag_(noop_flag, are_finite(checked))
    others = [y.reshape(x.shape) for x, y in zip(xs, _multiply(ys, b), strict=True)]
    products = _multiply(xs, a)
    write_(targets, torch._foreach_add(products, others) if products else [])


def _multiply(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    if isinstance(factor, Tensor):
        factor = factor.data.reshape(())
        return [wide * factor.to(wide.device) for wide in widen(tensors)]
    return list(torch._foreach_mul(widen(tensors), float(factor))) if tensors else []


def _norms(
    flag: Tensor | None, tensors: Sequence[Tensor], per_tensor: bool | None, factor: Tensor | float = 1.0
) -> tuple[Tensor, Tensor]:
    # As apex did, the norm of each tensor comes in one vector, on the device of the first.
    parts = norms(tensors)
    device = next((part.device for part in parts), None if flag is None else flag.device)
    total = total_norm(parts, device) * factor
    set_flag_(flag, total.isfinite())
    if not per_tensor or not parts:
        return total.reshape(1), torch.empty(0, device=device)
    return total.reshape(1), torch.stack([part.to(device, torch.float32) for part in parts]) * factor


@past_autograd
def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns the 2-norm over all tensors, of shape [1], and that of each, or an empty tensor.

    Sets the flag to 1 if the norm is not finite.
    """
    (tensors,) = check_lists("multi_tensor_l2norm", tensor_lists, 1)
    return _norms(noop_flag, tensors, per_tensor)


@past_autograd
def multi_tensor_l2norm_mp(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns what `multi_tensor_l2norm` does, which takes lists of mixed types as well."""
    (tensors,) = check_lists("multi_tensor_l2norm_mp", tensor_lists, 1)
    return _norms(noop_flag, tensors, per_tensor)


@past_autograd
def multi_tensor_l2norm_scale(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    scale: float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Scales as `multi_tensor_scale` does, and returns the norms of the results before they are rounded."""
    sources, targets = check_lists("multi_tensor_l2norm_scale", tensor_lists, 2)
    products = _multiply(sources, scale)
    write_(targets, products)
    return _norms(noop_flag, products, per_tensor)


@past_autograd
def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    inv_scale: Tensor | float,
    per_tensor: bool | None = False,
) -> tuple[Tensor, Tensor]:
    """Returns the norms that the tensors would have times `inv_scale`; writes nothing but the flag."""
    (tensors,) = check_lists("multi_tensor_unscale_l2norm", tensor_lists, 1)
    return _norms(noop_flag, _multiply(tensors, inv_scale), per_tensor)


@past_autograd
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Updates a loss scale in place, and returns it: it falls with the `hysteresis`-th overflow in a row."""
    trackers = (current_scale, growth_tracker, hysteresis_tracker)
    scale, clean, left = (tracker.data.reshape(()) for tracker in trackers)  # views: of shape [] or [1]
    overflowed = (found_inf.data > 0).to(scale.device).reshape(())
    remaining = torch.where(overflowed, left - 1, hysteresis)
    grows = ~overflowed & (clean + 1 == growth_interval)
    grown = scale * growth_factor
    new = torch.where(overflowed & (remaining <= 0), scale * backoff_factor, scale)
    scale.copy_(torch.where(grows & grown.isfinite(), grown, new))
    clean.copy_(torch.where(overflowed | grows, 0, clean + 1))
    left.copy_(remaining)
    return current_scale

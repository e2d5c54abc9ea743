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
from ampatch.apex.multi_tensor_apply.kernels import kernel, set_flag_, write_
from ampatch.apex.multi_tensor_apply.norms import are_finite, compute_type, norms, total_norm
from ampatch.apex.multi_tensor_apply.updates import adam_

__all__ = [
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_adam",
]

Flag = Tensor | None
Lists = list[list[Tensor]]


@kernel(2)
def multi_tensor_scale(flag: Flag, lists: Lists, scale: float | Tensor) -> None:
    """Writes each tensor of the first list, times `scale`, into that of the second.

    Sets the flag to 1 if an input is inf or NaN.
    """
    sources, targets = lists
    set_flag_(flag, are_finite(sources))
    write_(targets, _multiply(sources, scale))


@kernel(3)
def multi_tensor_axpby(flag: Flag, lists: Lists, a: float, b: float, arg_to_check: int = -1) -> None:
    """Writes a * x + b * y, for x, y of the first two lists, into the tensors of the third.

    Sets the flag to 1 if an x (`arg_to_check` 0), a y (1) or any of both (-1) is inf or NaN.
    """
    xs, ys, targets = lists
    checked = {0: xs, 1: ys, -1: [*xs, *ys]}.get(arg_to_check)
    if checked is None:
        raise amp.AmpValueError(
            f"multi_tensor_axpby: arg_to_check={arg_to_check!r}: expected 0 for x, 1 for y or -1 for both"
        )
    set_flag_(flag, are_finite(checked))
    others = [y.reshape(x.shape) for x, y in zip(xs, _multiply(ys, b), strict=True)]
    products = _multiply(xs, a)
    write_(targets, torch._foreach_add(products, others) if products else [])


def _multiply(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    wide = [tensor.to(compute_type(tensor.dtype)) for tensor in tensors]
    if isinstance(factor, Tensor):
        factor = factor.data.reshape(())
        return [tensor * factor.to(tensor.device) for tensor in wide]
    return list(torch._foreach_mul(wide, float(factor))) if wide else []


@kernel(1)
def multi_tensor_l2norm(flag: Flag, lists: Lists, per_tensor: bool | None = False) -> tuple[Tensor, Tensor]:
    """Returns the 2-norm over all tensors, of shape [1], and that of each, or an empty tensor.

    Sets the flag to 1 if the norm is not finite.
    """
    parts = norms(lists[0])
    # As apex did, the norm of each tensor comes in one vector, on the device of the first.
    device = next((part.device for part in parts), None if flag is None else flag.device)
    total = total_norm(parts, device)
    set_flag_(flag, total.isfinite())
    if not per_tensor or not parts:
        return total.reshape(1), torch.empty(0, device=device)
    return total.reshape(1), torch.stack([part.to(device, torch.float32) for part in parts])


multi_tensor_l2norm_mp = multi_tensor_l2norm  # which takes lists of mixed types as well


# ---- The step that toolkits call in subclasses of FusedAdam ----


@kernel(4)
def multi_tensor_adam(flag: Flag, lists: Lists, *numbers: float) -> None:
    """One step of Adam, a no-op while the flag is 1; `mode` 1 is AdamW's.

    The lists are gradients, parameters and the two running means; it computes on float32 copies.
    """
    if not lists[0]:
        return
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = numbers
    options = {"lr": float(lr), "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    # With infinitely many steps done, torch corrects nothing.
    done = int(step) - 1 if bias_correction else float("inf")
    copies = [_copy(tensors) for tensors in lists]
    adam_(copies, [torch.tensor(float(done)) for _ in lists[0]], options, mode == 1)
    for targets, results in zip(lists[1:], copies[1:], strict=True):
        write_(targets, results if flag is None else _keep_if(flag, targets, results))


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    kind = torch.contiguous_format
    return [tensor.to(compute_type(tensor.dtype), copy=True, memory_format=kind) for tensor in tensors]


def _keep_if(flag: Tensor, targets: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    is_set = (flag.data != 0).any()
    return [
        torch.where(is_set.to(target.device), target.to(result.dtype), result)
        for target, result in zip(targets, results, strict=True)
    ]

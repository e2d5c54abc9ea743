"""What `amp_C` resolves to: functions on lists of tensors, on torch's foreach functions.

They write past autograd, as a kernel does: results go into live leaf parameters without a graph and
without a version, also between types. Computed is in float32, or float64 where a tensor is. The flag
is set in place on its device, never read: no host sync. `chunk_size` has no meaning.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw

import ampatch as amp
from ampatch.steps.masters import is_wrapper

__all__ = [
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_adam",
]

Flag = Tensor | None
Lists = Sequence[Sequence[Tensor]]
Kernel = Callable[..., object]


def kernel(count: int) -> Callable[[Kernel], Kernel]:
    """Decorates a function on a flag and `count` lists: it runs without a graph, and without casts."""

    def decorate(function: Kernel) -> Kernel:
        @functools.wraps(function)
        def run(
            chunk_size: int, noop_flag: Flag, tensor_lists: Lists, *args: object, **kwargs: object
        ) -> object:
            lists = [[tensor.data for tensor in tensors] for tensors in tensor_lists]
            lengths = [len(tensors) for tensors in lists]
            if len(lists) != count or len({*lengths}) > 1:
                raise amp.AmpValueError(
                    f"{function.__name__}: found lists of {lengths} tensors, expected {count} lists of the "
                    f"same length"
                )
            with torch.no_grad(), amp.disable_casts():
                return function(noop_flag, lists, *args, **kwargs)

        del run.__wrapped__  # which takes other arguments than help and inspect are to show
        return run

    return decorate


def write_(targets: Sequence[Tensor], results: Sequence[Tensor]) -> None:
    """Writes results into tensors of any type, on any device."""
    plain: list[tuple[Tensor, Tensor]] = []
    for target, result in zip(targets, results, strict=True):
        result = result if result.shape == target.shape else result.reshape(target.shape)
        if is_wrapper(target):
            target.copy_(result)
        elif target.numel():
            plain.append((target, result))
    if plain:
        torch._foreach_copy_([target for target, _ in plain], [result for _, result in plain])


def set_flag_(flag: Flag, checked: Sequence[Tensor]) -> None:
    """Sets the flag to 1 if an element is inf or NaN; leaves it as it is otherwise. No host sync."""
    largest = norms([tensor for tensor in checked if tensor.numel()], float("inf"))
    if flag is not None and largest:
        together = torch.stack([norm.to(flag.device, torch.float32) for norm in largest])
        flag.data.masked_fill_(~together.isfinite().all(), 1)


@kernel(2)
def multi_tensor_scale(flag: Flag, lists: Lists, scale: float | Tensor) -> None:
    """Writes each tensor of the first list, times `scale`, into that of the second.

    Sets the flag to 1 if an input is inf or NaN.
    """
    sources, targets = lists
    set_flag_(flag, sources)
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
    set_flag_(flag, checked)
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
    set_flag_(flag, [total])
    if not per_tensor or not parts:
        return total.reshape(1), torch.empty(0, device=device)
    return total.reshape(1), torch.stack([part.to(device, torch.float32) for part in parts])


multi_tensor_l2norm_mp = multi_tensor_l2norm  # which takes lists of mixed types as well


# ---- Adam, which toolkits call in subclasses of FusedAdam ----


def adam_(
    lists: Lists, steps: Sequence[Tensor], options: Mapping[str, object], adam_w_mode: bool, **fused: object
) -> None:
    """One step of torch's Adam, or AdamW; a fifth list is that of amsgrad.

    The lists are in the order of `multi_tensor_adam`, and `fused` are options of torch's fused kernel.
    """
    grads, params, exp_avgs, exp_avg_sqs, *maxima = lists
    beta1, beta2 = options["betas"]
    (adamw if adam_w_mode else adam)(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        maxima[0] if maxima else [],
        steps,
        **{name: options[name] for name in ("lr", "eps", "weight_decay")},
        beta1=beta1,
        beta2=beta2,
        amsgrad=bool(maxima),
        maximize=False,
        has_complex=any(param.is_complex() for param in params),
        **fused,
    )


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


# ---- Norms of many tensors, accumulated in float32 whatever their type; no host sync ----

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

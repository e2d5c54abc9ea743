"""The functions of `amp_C` that step an optimizer: no-ops while the flag they are given is 1.

They take lists of gradients, of parameters and of what is remembered of gradients, and then numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ampatch.apex.multi_tensor_apply import updates
from ampatch.apex.multi_tensor_apply.kernels import kernel, write_
from ampatch.apex.multi_tensor_apply.norms import compute_type
from ampatch.apex.multi_tensor_apply.updates import Options

Flag = Tensor | None
Lists = list[list[Tensor]]


def _step(flag: Flag, lists: Lists, update: Callable[..., object], *args: object) -> None:
    """Runs an update on float32 copies, and writes all but the gradients back where the flag is not set."""
    if not lists[0]:
        return
    copies = [_copy(tensors) for tensors in lists]
    update(copies, *args)
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


def _steps(lists: Lists, done: float) -> list[Tensor]:
    return [torch.tensor(float(done)) for _ in lists[0]]


@kernel(4)
def multi_tensor_adam(flag: Flag, lists: Lists, *numbers: float) -> None:
    """One step of Adam; `mode` 1 is AdamW's."""
    lr, beta1, beta2, eps, step, mode, bias_correction, weight_decay = numbers
    options = {"lr": float(lr), "betas": (beta1, beta2), "eps": eps, "weight_decay": weight_decay}
    # With infinitely many steps done, torch corrects nothing.
    done = int(step) - 1 if bias_correction else float("inf")
    _step(flag, lists, updates.adam_, _steps(lists, done), options, mode == 1)


@kernel(3)
def multi_tensor_adagrad(flag: Flag, lists: Lists, *numbers: float) -> None:
    """One step of Adagrad; weights decay apart in `mode` 1."""
    lr, eps, mode, weight_decay = numbers
    options = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    _step(flag, lists, updates.adagrad_, _steps(lists, 0), options, mode == 1)


@kernel(3, most=4)
def multi_tensor_sgd(flag: Flag, lists: Lists, *numbers: float) -> None:
    """One step of SGD on gradients times `scale`; a fourth list takes the new parameters in another type."""
    wd, momentum, dampening, lr, nesterov, first_run, wd_after_momentum, scale = (*numbers, 1.0)[:8]
    options = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}

    def update(copies: Lists) -> None:
        grads, params, buffers, *others = copies
        torch._foreach_mul_(grads, scale)
        made: list[Tensor | None] = [None] * len(params) if first_run or not momentum else list(buffers)
        updates.sgd_(grads, params, made, {**options, "weight_decay": wd}, wd_after_momentum)
        if momentum:
            write_(buffers, [buffer for buffer in made if buffer is not None])
        for copied in others:
            write_(copied, params)

    _step(flag, lists, update)


@kernel(4)
def multi_tensor_lamb(flag: Flag, lists: Lists, *numbers: float | Tensor | None) -> None:
    """One step of LAMB; `mode` 1 is AdamW's."""
    *common, mode, norm, max_norm, use_nvlamb = (*numbers, False)[:12]

    def update(copies: Lists) -> None:
        norm_here = torch.as_tensor(norm, dtype=torch.float32, device=copies[0][0].device).reshape(())
        divisor = updates.clip_divisor(norm_here, max_norm)
        updates.lamb_(copies, _read_options(*common), mode == 1, bool(use_nvlamb), divisor)

    _step(flag, lists, update)


@kernel(3)
def multi_tensor_novograd(flag: Flag, lists: Lists, grad_norms: Tensor, *numbers: float) -> None:
    """One step of NovoGrad, which blends `grad_norms` in place.

    With `mode` 0 gradients are normalized, and weights decay, before the running mean.
    """
    *common, mode, norm_type = numbers

    def update(copies: Lists) -> None:
        grads, params, exp_avgs, (running,) = copies
        options = _read_options(*common)
        blended = updates.blend_norms(running.unbind(), grads, options["betas"][1], norm_type)
        updates.novograd_([grads, params, exp_avgs, blended], options, mode == 0)
        running.copy_(torch.stack(blended))

    _step(flag, [*lists, [grad_norms.data]], update)


def _read_options(lr: float, beta1: float, beta2: float, eps: float, step: int, *rest: float) -> Options:
    names = ("bias_correction", "weight_decay", "grad_averaging")
    options = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "step": int(step)}
    return {**options, **dict(zip(names, rest, strict=True))}

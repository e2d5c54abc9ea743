"""The functions of `amp_C` that step an optimizer: no-ops while the flag they are given is 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ampatch.apex.multi_tensor_apply.kernels import check_lists, past_autograd, write_
from ampatch.apex.multi_tensor_apply.norms import compute_type
from ampatch.apex.multi_tensor_apply.updates import (
    Moments,
    blend_norms,
    clip_divisor,
    lamb_,
    novograd_,
)

TensorLists = Sequence[Sequence[Tensor]]


def _copy(tensors: Sequence[Tensor]) -> list[Tensor]:
    kind = torch.contiguous_format
    return [tensor.to(compute_type(tensor.dtype), copy=True, memory_format=kind) for tensor in tensors]


def _update(
    flag: Tensor | None, lists: list[list[Tensor]], written: Sequence[int], step: Callable[..., object]
) -> None:
    """Runs a step on float32 copies, and writes back the lists named, where the flag is not set."""
    copies = [_copy(tensors) for tensors in lists]
    if not lists[0]:
        return
    step(*copies)
    for index in written:
        targets, results = lists[index], copies[index]
        write_(targets, results if flag is None else _keep_if(flag, targets, results))


def _keep_if(flag: Tensor, targets: list[Tensor], results: list[Tensor]) -> list[Tensor]:
    is_set = (flag.data != 0).any()
    return [
        torch.where(is_set.to(target.device), target.to(result.dtype), result)
        for target, result in zip(targets, results, strict=True)
    ]


def _steps(count: int, done: float) -> list[Tensor]:
    return [torch.tensor(float(done)) for _ in range(count)]


@past_autograd
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam on lists of gradients, parameters and both running means; `mode` 1 is AdamW's."""

    def run(grads: list, params: list, exp_avgs: list, exp_avg_sqs: list) -> None:
        # With infinitely many steps done, torch corrects nothing.
        done = int(step) - 1 if bias_correction else float("inf")
        (adamw if mode == 1 else adam)(
            params, grads, exp_avgs, exp_avg_sqs, [], _steps(len(params), done),
            amsgrad=False, beta1=beta1, beta2=beta2, lr=float(lr), weight_decay=weight_decay, eps=epsilon,
            maximize=False,
        )  # fmt: skip

    _update(noop_flag, check_lists("multi_tensor_adam", tensor_lists, 4), (1, 2, 3), run)


@past_autograd
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """One step of Adagrad on lists of gradients, parameters and sums; weights decay apart in `mode` 1."""

    def run(grads: list, params: list, sums: list) -> None:
        if mode == 1:
            torch._foreach_mul_(params, 1 - lr * weight_decay)
        adagrad(
            params, grads, sums, _steps(len(params), 0), lr=lr,
            weight_decay=0.0 if mode == 1 else weight_decay, lr_decay=0.0, eps=epsilon, maximize=False,
        )  # fmt: skip

    _update(noop_flag, check_lists("multi_tensor_adagrad", tensor_lists, 3), (1, 2), run)


@past_autograd
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float = 1.0,
) -> None:
    """One step of SGD on lists of gradients (times `scale`), parameters and momenta.

    A fourth list takes the new parameters in another type.
    """
    lists = check_lists("multi_tensor_sgd", tensor_lists, 3, most=4)

    def run(grads: list, params: list, buffers: list, *copies: list) -> None:
        torch._foreach_mul_(grads, scale)
        if wd_after_momentum:
            torch._foreach_mul_(params, 1 - lr * wd)
        made: list[Tensor | None] = [None] * len(params) if first_run or not momentum else list(buffers)
        sgd(
            params, grads, made, weight_decay=0.0 if wd_after_momentum else wd, momentum=momentum, lr=lr,
            dampening=dampening, nesterov=nesterov, maximize=False,
        )  # fmt: skip
        if momentum:
            write_(buffers, [buffer for buffer in made if buffer is not None])
        for copied in copies:
            write_(copied, params)

    _update(noop_flag, lists, range(1, len(lists)), run)


@past_autograd
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor | float,
    max_grad_norm: float,
    use_nvlamb_python: bool | None = False,
) -> None:
    """One step of LAMB on lists of gradients, parameters and both running means; `mode` 1 is AdamW's."""
    correct, average = bool(bias_correction), bool(grad_averaging)
    moments = Moments(beta1, beta2, epsilon, int(step), correct, average, weight_decay)

    def run(grads: list, params: list, exp_avgs: list, exp_avg_sqs: list) -> None:
        lamb_(
            params, grads, exp_avgs, exp_avg_sqs, lr=lr, moments=moments, adam_w_mode=mode == 1,
            use_nvlamb=bool(use_nvlamb_python),
            divisor=clip_divisor(_scalar(global_grad_norm, grads[0]), max_grad_norm),
        )  # fmt: skip

    _update(noop_flag, check_lists("multi_tensor_lamb", tensor_lists, 4), (1, 2, 3), run)


def _scalar(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float32, device=like.device).reshape(())


@past_autograd
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor | None,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """One step of NovoGrad on lists of gradients, parameters and running means; blends `grad_norms` in place.

    With `mode` 0 gradients are normalized, and weights decay, before the running mean.
    """
    correct, average = bool(bias_correction), bool(grad_averaging)
    moments = Moments(beta1, beta2, epsilon, int(step), correct, average, weight_decay)
    lists = check_lists("multi_tensor_novograd", tensor_lists, 3)

    def run(grads: list, params: list, exp_avgs: list, running: list) -> None:
        blended = blend_norms(running[0].unbind(), grads, beta2, norm_type)
        novograd_(params, grads, exp_avgs, blended, lr=lr, moments=moments, reg_inside_moment=mode == 0)
        running[0].copy_(torch.stack(blended))

    if lists[0]:
        _update(noop_flag, [*lists, [grad_norms.data]], (1, 2, 3), run)

"""The updates of the fused optimizers, on float32 tensors that lie on one device; no host sync.

Each takes lists in the order of `amp_C`: gradients, parameters, and what is remembered of gradients. All
but the gradients are changed in place. Options have the names that they have in a param group.

LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
NovoGrad: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from ampatch.apex.multi_tensor_apply.norms import norms, total_norm

Tensors = Sequence[Tensor]
Lists = Sequence[Tensors]
Options = Mapping[str, object]


# ---- Torch's; `fused` are options of its fused kernels ----


def adam_(lists: Lists, steps: Tensors, options: Options, adam_w_mode: bool, **fused: object) -> None:
    """One step of Adam, or AdamW; a fifth list is that of amsgrad."""
    grads, params, exp_avgs, exp_avg_sqs, *maxima = lists
    beta1, beta2 = options["betas"]
    (adamw if adam_w_mode else adam)(
        *(params, grads, exp_avgs, exp_avg_sqs, maxima[0] if maxima else [], steps),
        **_pick(options, "lr", "eps", "weight_decay"),
        **{"beta1": beta1, "beta2": beta2, "amsgrad": bool(maxima), "maximize": False},
        has_complex=_has_complex(params),
        **fused,
    )


def adagrad_(lists: Lists, steps: Tensors, options: Options, is_apart: bool, **fused: object) -> None:
    """One step of Adagrad; weights may decay apart from it."""
    grads, params, sums = lists
    numbers = _pick(_decay_apart(params, options, is_apart), "lr", "eps", "weight_decay")
    rest = {"lr_decay": 0.0, "has_complex": _has_complex(params), "maximize": False}
    adagrad(params, grads, sums, steps, **numbers, **rest, **fused)


def sgd_(
    grads: Tensors,
    params: Tensors,
    buffers: list[Tensor | None],
    options: Options,
    is_apart: bool,
    **fused: object,
) -> None:
    """One step of SGD; weights may decay apart from the momentum, whose buffers are made where None."""
    names = ("lr", "momentum", "dampening", "nesterov", "weight_decay")
    numbers = _pick(_decay_apart(params, options, is_apart), *names)
    sgd(params, grads, buffers, maximize=False, **numbers, **fused)


def _pick(options: Options, *names: str) -> dict[str, object]:
    return {name: options[name] for name in names}


def _has_complex(params: Tensors) -> bool:
    return any(param.is_complex() for param in params)


def _decay_apart(params: Tensors, options: Options, is_apart: bool) -> Options:
    """Decays weights now, if they do so apart: w - lr * (update + wd * w), for an update without w."""
    if not is_apart:
        return options
    if options["weight_decay"]:
        torch._foreach_mul_(params, 1 - options["lr"] * options["weight_decay"])
    return {**options, "weight_decay": 0.0}


# ---- LAMB and NovoGrad ----


def clip_divisor(norm: Tensor, max_norm: float | Tensor | None) -> Tensor | None:
    """Returns what gradients of a norm are divided by to be clipped; None for no clipping."""
    if max_norm is None or (not isinstance(max_norm, Tensor) and max_norm <= 0):
        return None
    return (norm / max_norm).clamp(min=1.0)


def clip(grads: Tensors, max_norm: float) -> Tensors:
    """Returns gradients such that their norm, over all of them, is at most `max_norm`."""
    divisor = clip_divisor(total_norm(norms(grads)), max_norm)
    return grads if divisor is None else [grad / divisor.to(grad.device) for grad in grads]


def lamb_(
    lists: Lists, options: Options, adam_w_mode: bool, use_nvlamb: bool, divisor: Tensor | None
) -> None:
    """One step of LAMB, whose gradients are divided by `divisor`, see `clip_divisor`.

    Layers are scaled only where there is weight decay, or with `use_nvlamb`.
    """
    grads, params, exp_avgs, exp_avg_sqs = lists
    decay, (_, beta2), (first, second) = options["weight_decay"], options["betas"], _corrections(options)
    grads = grads if divisor is None else torch._foreach_div(grads, divisor)
    if decay and not adam_w_mode:
        grads = torch._foreach_add(grads, params, alpha=decay)
    _average_(exp_avgs, grads, options)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    root = torch._foreach_div(exp_avg_sqs, second)
    torch._foreach_sqrt_(root)
    torch._foreach_add_(root, options["eps"])
    direction = torch._foreach_div(exp_avgs, first)
    torch._foreach_div_(direction, root)
    if decay and adam_w_mode:
        torch._foreach_add_(direction, params, alpha=decay)
    if use_nvlamb or decay:
        torch._foreach_mul_(direction, _trust_ratios(norms(params), norms(direction)))
    torch._foreach_mul_(direction, options["lr"])
    torch._foreach_sub_(params, direction)


def _corrections(options: Options) -> tuple[float, float]:
    """Returns what the two running means are divided by: they began with 0."""
    if not options["bias_correction"]:
        return 1.0, 1.0
    beta1, beta2 = options["betas"]
    return 1 - beta1 ** options["step"], 1 - beta2 ** options["step"]


def _average_(exp_avgs: Tensors, grads: Tensors, options: Options) -> None:
    beta1, _ = options["betas"]
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=1 - beta1 if options["grad_averaging"] else 1.0)


def _trust_ratios(param_norms: Tensors, update_norms: Tensors) -> Tensors:
    """Returns by how much each layer's step is longer: the norm of its weights by that of its update.

    1 where one of the two is 0.
    """
    params, updates = torch.stack(tuple(param_norms)), torch.stack(tuple(update_norms))
    return torch.where((params != 0) & (updates != 0), params / updates, 1.0).unbind()


def blend_norms(running: Tensors, grads: Tensors, beta2: float, norm_type: int) -> Tensors:
    """Returns NovoGrad's running norms with those of new gradients: squares are averaged for a 2-norm."""
    old, new = torch.stack(tuple(running)), torch.stack(norms(grads, 2.0 if norm_type == 2 else math.inf))
    if norm_type == 2:
        return (beta2 * old.square() + (1 - beta2) * new.square()).sqrt().unbind()
    return (beta2 * old + (1 - beta2) * new).unbind()


def novograd_(lists: Lists, options: Options, reg_inside_moment: bool) -> None:
    """One step of NovoGrad; the last list holds the running norms, with those of these gradients.

    Gradients are normalized, and weights decay, before the running mean with `reg_inside_moment`, and
    after it otherwise.
    """
    grads, params, exp_avgs, grad_norms = lists
    first, second = _corrections(options)
    divisors = (torch.stack(tuple(grad_norms)) / math.sqrt(second) + options["eps"]).unbind()
    if reg_inside_moment:
        grads = _normalize(grads, divisors, params, options)
    _average_(exp_avgs, grads, options)
    direction = torch._foreach_div(exp_avgs, first)
    if not reg_inside_moment:
        direction = _normalize(direction, divisors, params, options)
    torch._foreach_mul_(direction, options["lr"])
    torch._foreach_sub_(params, direction)


def _normalize(update: Tensors, divisors: Tensors, params: Tensors, options: Options) -> Tensors:
    update = torch._foreach_div(update, divisors)
    if options["weight_decay"]:
        torch._foreach_add_(update, params, alpha=options["weight_decay"])
    return update

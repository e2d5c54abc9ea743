"""The updates of LAMB and NovoGrad, on lists of float32 tensors that lie on one device; no host sync.

LAMB: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
NovoGrad: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ampatch.apex.multi_tensor_apply.norms import norms, total_norm

Tensors = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Moments:
    """How two running means of gradients are kept, and what is added for the weights themselves."""

    beta1: float
    beta2: float
    eps: float
    step: int  # counted from 1
    bias_correction: bool = True
    grad_averaging: bool = True
    weight_decay: float = 0.0

    @property
    def share(self) -> float:
        """What a new gradient counts for in the first mean."""
        return 1 - self.beta1 if self.grad_averaging else 1.0

    @property
    def corrections(self) -> tuple[float, float]:
        """What the two means are divided by: they began with 0."""
        if not self.bias_correction:
            return 1.0, 1.0
        return 1 - self.beta1**self.step, 1 - self.beta2**self.step


def clip_divisor(norm: Tensor, max_norm: float | Tensor | None) -> Tensor | None:
    """Returns what gradients of a norm are divided by to be clipped; None for no clipping."""
    if max_norm is None or (not isinstance(max_norm, Tensor) and max_norm <= 0):
        return None
    return (norm / max_norm).clamp(min=1.0)


def lamb_direction(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    moments: Moments,
    adam_w_mode: bool,
    divisor: Tensor | None = None,
) -> list[Tensor]:
    """Updates the running means, and returns the way to go: Adam's, before LAMB scales it by layer."""
    grads = list(grads) if divisor is None else torch._foreach_div(grads, divisor)
    if moments.weight_decay and not adam_w_mode:
        grads = torch._foreach_add(grads, params, alpha=moments.weight_decay)
    torch._foreach_mul_(exp_avgs, moments.beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=moments.share)
    torch._foreach_mul_(exp_avg_sqs, moments.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - moments.beta2)
    first, second = moments.corrections
    root = torch._foreach_div(exp_avg_sqs, second)
    torch._foreach_sqrt_(root)
    torch._foreach_add_(root, moments.eps)
    direction = torch._foreach_div(exp_avgs, first)
    torch._foreach_div_(direction, root)
    if moments.weight_decay and adam_w_mode:
        torch._foreach_add_(direction, params, alpha=moments.weight_decay)
    return list(direction)


def trust_ratios(param_norms: Tensors, update_norms: Tensors) -> list[Tensor]:
    """Returns by how much each layer's step is longer: the norm of its weights by that of its update.

    1 where one of the two is 0.
    """
    params, updates = torch.stack(tuple(param_norms)), torch.stack(tuple(update_norms))
    return list(torch.where((params != 0) & (updates != 0), params / updates, 1.0).unbind())


def lamb_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    lr: float | Tensor,
    moments: Moments,
    adam_w_mode: bool = True,
    use_nvlamb: bool = False,
    divisor: Tensor | None = None,
) -> None:
    """One step of LAMB, in place.

    Layers are scaled only where there is weight decay, or with `use_nvlamb`. `divisor` divides the
    gradients, see `clip_divisor`.
    """
    if not params:
        return
    direction = lamb_direction(params, grads, exp_avgs, exp_avg_sqs, moments, adam_w_mode, divisor)
    if use_nvlamb or moments.weight_decay:
        torch._foreach_mul_(direction, trust_ratios(norms(params), norms(direction)))
    torch._foreach_mul_(direction, lr)
    torch._foreach_sub_(params, direction)


def blend_norms(running: Tensors, grads: Tensors, beta2: float, norm_type: int) -> list[Tensor]:
    """Returns NovoGrad's running norms with those of new gradients: squares are averaged for a 2-norm."""
    old, new = torch.stack(tuple(running)), torch.stack(norms(grads, 2.0 if norm_type == 2 else math.inf))
    if norm_type == 2:
        return list((beta2 * old.square() + (1 - beta2) * new.square()).sqrt().unbind())
    return list((beta2 * old + (1 - beta2) * new).unbind())


def novograd_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    grad_norms: Tensors,
    *,
    lr: float | Tensor,
    moments: Moments,
    reg_inside_moment: bool = False,
) -> None:
    """One step of NovoGrad, in place, with the running norms that include this step's gradients.

    Gradients are normalized, and weights decay, before the running mean with `reg_inside_moment`, and
    after it otherwise.
    """
    if not params:
        return
    first, second = moments.corrections
    divisors = list((torch.stack(tuple(grad_norms)) / math.sqrt(second) + moments.eps).unbind())
    if reg_inside_moment:
        grads = _regularize(torch._foreach_div(grads, divisors), params, moments.weight_decay)
    torch._foreach_mul_(exp_avgs, moments.beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=moments.share)
    direction = torch._foreach_div(exp_avgs, first)
    if not reg_inside_moment:
        torch._foreach_div_(direction, divisors)
        _regularize(direction, params, moments.weight_decay)
    torch._foreach_mul_(direction, lr)
    torch._foreach_sub_(params, direction)


def _regularize(update: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    if weight_decay:
        torch._foreach_add_(update, params, alpha=weight_decay)
    return update


def clip(grads: Tensors, max_norm: float) -> Tensors:
    """Returns gradients such that their norm, over all of them, is at most `max_norm`."""
    divisor = clip_divisor(total_norm(norms(grads)), max_norm)
    return grads if divisor is None else [grad / divisor.to(grad.device) for grad in grads]

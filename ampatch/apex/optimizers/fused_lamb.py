"""FusedLAMB: LAMB, whose steps are as long as each layer's weights allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ampatch.apex.amp_C import multi_tensor_l2norm
from ampatch.apex.multi_tensor_apply.norms import clip_divisor, norms
from ampatch.apex.optimizers.fused_optimizer import (
    Batch,
    Group,
    GroupCountingOptimizer,
    Params,
    average_,
    bias_corrections,
)


class FusedLAMB(GroupCountingOptimizer):
    """LAMB with the arguments that apex's FusedLAMB had.

    Gradients are first clipped, all groups together, to a norm of `max_grad_norm` (0 or None: not). Layers
    without weight decay take Adam's step, unless `use_nvlamb` is set. No host sync.

    Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", 2019.
    """

    multi_tensor_l2norm = staticmethod(multi_tensor_l2norm)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        set_grad_none: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.use_nvlamb = use_nvlamb
        self._divisor: Tensor | None = None
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging}
        super().__init__(params, {**defaults, **more, "max_grad_norm": max_grad_norm}, set_grad_none)

    def _prepare(self, grads: Sequence[Tensor]) -> None:
        # As apex did, the bound that the optimizer was made with counts, for all groups together.
        self._divisor = clip_divisor(grads, self.defaults["max_grad_norm"])

    def _update(self, group: Group, batch: Batch) -> None:
        grads, params, decay = batch.grads, batch.params, group["weight_decay"]
        exp_avgs, exp_avg_sqs = (self._moments(name, batch) for name in ("exp_avg", "exp_avg_sq"))
        first, second = bias_corrections(group)
        if self._divisor is not None:
            grads = torch._foreach_div(grads, self._divisor.to(batch.device))
        if decay and not self.adam_w_mode:
            grads = torch._foreach_add(grads, params, alpha=decay)
        average_(exp_avgs, grads, group)
        torch._foreach_mul_(exp_avg_sqs, group["betas"][1])
        torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - group["betas"][1])
        root = torch._foreach_div(exp_avg_sqs, second)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, group["eps"])
        direction = torch._foreach_div(exp_avgs, first)
        torch._foreach_div_(direction, root)
        if decay and self.adam_w_mode:
            torch._foreach_add_(direction, params, alpha=decay)
        if self.use_nvlamb or decay:
            torch._foreach_mul_(direction, _trust_ratios(norms(params), norms(direction)))
        torch._foreach_mul_(direction, group["lr"])
        torch._foreach_sub_(params, direction)


def _trust_ratios(param_norms: Sequence[Tensor], update_norms: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns by how much each layer's step is longer: the norm of its weights by that of its update.

    1 where one of the two is 0.
    """
    params, updates = torch.stack(tuple(param_norms)), torch.stack(tuple(update_norms))
    return torch.where((params != 0) & (updates != 0), params / updates, 1.0).unbind()

"""FusedNovoGrad: NovoGrad, which normalizes the gradients of each layer by one running norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.norms import norms
from ampatch.apex.optimizers.fused_optimizer import (
    Batch,
    Group,
    GroupCountingOptimizer,
    Params,
    average_,
    bias_corrections,
)
from ampatch.levels.precision import HALF_TYPES


class FusedNovoGrad(GroupCountingOptimizer):
    """NovoGrad with the arguments that apex's FusedNovoGrad had.

    The state of a parameter is `exp_avg` and, in `exp_avg_sq`, the running norm of its gradients (not
    the square; of 2-norms the squares are averaged, of infinity norms, `norm_type=0`, the norms). It
    begins with the norm of the first gradient, or with 0 (`init_zero`). No host sync.

    Source: Ginsburg et al., "Stochastic Gradient Methods with Layer-wise Adaptive Moments", 2019.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        self._refuse_amsgrad(amsgrad)
        if norm_type not in (0, 2):
            raise amp.AmpValueError(
                f"FusedNovoGrad: norm_type={norm_type!r}: expected 2, or 0 for the infinity norm"
            )
        self.reg_inside_moment = reg_inside_moment
        self.moment_mode = 0 if reg_inside_moment else 1
        self.norm_type = norm_type
        self.init_zero = init_zero
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        more = {"weight_decay": weight_decay, "grad_averaging": grad_averaging, "norm_type": norm_type}
        super().__init__(params, {**defaults, **more, "init_zero": init_zero}, set_grad_none)

    def _update(self, group: Group, batch: Batch) -> None:
        first, second = bias_corrections(group)
        new_norms = self._blend_norms(batch, group["betas"][1])
        divisors = (new_norms / math.sqrt(second) + group["eps"]).unbind()
        exp_avgs, grads = self._moments("exp_avg", batch), batch.grads
        if self.reg_inside_moment:
            grads = _normalize(grads, divisors, batch.params, group["weight_decay"])
        average_(exp_avgs, grads, group)
        direction = torch._foreach_div(exp_avgs, first)
        if not self.reg_inside_moment:
            direction = _normalize(direction, divisors, batch.params, group["weight_decay"])
        torch._foreach_mul_(direction, group["lr"])
        torch._foreach_sub_(batch.params, direction)
        for owner, norm in zip(batch.owners, new_norms, strict=True):
            self.state[owner]["exp_avg_sq"].copy_(norm)

    def _blend_norms(self, batch: Batch, beta2: float) -> Tensor:
        """Returns the running norms with those of new gradients: squares are averaged for a 2-norm."""
        parts = norms(batch.grads, 2.0 if self.norm_type == 2 else math.inf)
        for owner, norm in zip(batch.owners, parts, strict=True):
            state = self.state[owner]
            if "exp_avg_sq" not in state:
                # Not a view of all.
                state["exp_avg_sq"] = torch.zeros_like(norm) if self.init_zero else norm.clone()
            state["exp_avg_sq"] = state["exp_avg_sq"].to(norm.device, norm.dtype)
        old = torch.stack([self.state[owner]["exp_avg_sq"] for owner in batch.owners])
        new = torch.stack(parts)
        if self.norm_type == 2:
            return (beta2 * old.square() + (1 - beta2) * new.square()).sqrt()
        return beta2 * old + (1 - beta2) * new

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a checkpoint, ours or apex's, which had the running norms of a group together."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            kept = group.pop("exp_avg_sq", None)
            if kept is not None:
                states = [state_dict["state"].get(key, {}) for key in saved["params"]]
                self._spread_norms(group["params"], states, kept)

    def _spread_norms(
        self, params: Sequence[Tensor], saved: Sequence[dict[str, Tensor]], kept: Sequence[Tensor | None]
    ) -> None:
        """Gives each parameter its running norm: apex had those of float16 first, then of float32."""
        stepped = [
            (param, state["exp_avg"].dtype in HALF_TYPES)
            for param, state in zip(params, saved, strict=True)
            if "exp_avg" in state
        ]
        for norms_of_kind, is_half in zip(kept, (True, False), strict=True):
            values = () if norms_of_kind is None else norms_of_kind.float().unbind()
            kind_params = [param for param, kind in stepped if kind is is_half]
            if len(values) != len(kind_params):
                raise amp.AmpValueError(
                    f"FusedNovoGrad.load_state_dict: found {len(values)} norms in exp_avg_sq for "
                    f"{len(kind_params)} parameters with an exp_avg: expected one for each"
                )
            for param, value in zip(kind_params, values, strict=True):
                self.state[param]["exp_avg_sq"] = value.to(param.device, copy=True)


def _normalize(
    update: Sequence[Tensor], divisors: Sequence[Tensor], params: Sequence[Tensor], weight_decay: float
) -> Sequence[Tensor]:
    update = torch._foreach_div(update, divisors)
    if weight_decay:
        torch._foreach_add_(update, params, alpha=weight_decay)
    return update

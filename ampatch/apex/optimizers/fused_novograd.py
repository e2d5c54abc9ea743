"""FusedNovoGrad: NovoGrad, which normalizes the gradients of each layer by one running norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.norms import compute_type, norms
from ampatch.apex.multi_tensor_apply.updates import blend_norms, novograd_
from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_optimizer import Group, GroupCountingOptimizer, Params
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
        _, beta2 = group["betas"]
        blended = blend_norms(self._running_norms(batch), batch.grads, beta2, self.norm_type)
        novograd_((*self._lists(batch, "exp_avg"), blended), group, self.reg_inside_moment)
        for owner, norm in zip(batch.owners, blended, strict=True):
            self.state[owner]["exp_avg_sq"].copy_(norm)

    def _running_norms(self, batch: Batch) -> list[Tensor]:
        states = [self.state[owner] for owner in batch.owners]
        new = [index for index, state in enumerate(states) if "exp_avg_sq" not in state]
        first = norms([batch.grads[index] for index in new], 2.0 if self.norm_type == 2 else float("inf"))
        for index, norm in zip(new, first, strict=True):
            # Not a view of all.
            states[index]["exp_avg_sq"] = torch.zeros_like(norm) if self.init_zero else norm.clone()
        for state, grad in zip(states, batch.grads, strict=True):
            state["exp_avg_sq"] = state["exp_avg_sq"].to(grad.device, compute_type(grad.dtype))
        return [state["exp_avg_sq"] for state in states]

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
            found = [param for param, kind in stepped if kind is is_half]
            if len(values) != len(found):
                raise amp.AmpValueError(
                    f"FusedNovoGrad.load_state_dict: found {len(values)} norms in exp_avg_sq for "
                    f"{len(found)} parameters with an exp_avg: expected one for each"
                )
            for param, value in zip(found, values, strict=True):
                self.state[param]["exp_avg_sq"] = value.to(param.device, copy=True)

"""FusedAdam: Adam and AdamW by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.amp_C import adam_, multi_tensor_adam
from ampatch.apex.multi_tensor_apply.norms import clip_divisor
from ampatch.apex.optimizers.fused_optimizer import Batch, CountingOptimizer, Group, Params
from ampatch.levels.precision import HALF_TYPES


class FusedAdam(CountingOptimizer):
    """AdamW, or Adam with `adam_w_mode=False`, with the arguments that apex's FusedAdam had.

    `capturable` is accepted: a fused step can be captured in a CUDA graph anyway (give `lr` as a tensor
    to change it between replays). `eps_inside_sqrt` and `max_grad_norm`, which clips the gradients of
    each group, are arguments of apex's first FusedAdam.
    """

    fused_devices = ("cpu", "cuda", "xpu", "mps")
    multi_tensor_adam = staticmethod(multi_tensor_adam)

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        *,
        eps_inside_sqrt: bool = False,
        max_grad_norm: float = 0.0,
    ) -> None:
        if eps_inside_sqrt:
            raise amp.AmpValueError(
                "FusedAdam: eps_inside_sqrt=True is not supported, as in every apex since 2019: leave it out"
            )
        self.adam_w_mode = 1 if adam_w_mode else 0
        self.amsgrad = amsgrad
        self.capturable = capturable
        self.max_grad_norm = max_grad_norm
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        self._check_positive({"max_grad_norm": max_grad_norm})
        self.takes_scaled_grads = not max_grad_norm
        super().__init__(params, {**defaults, "weight_decay": weight_decay}, set_grad_none, master_weights)

    @property
    def param_groups_master(self) -> list[dict[str, list[Tensor | None]]]:
        """The masters, by param group; None for each parameter without `master_weights`.

        From then on what is written into them counts, however: at 2 bytes and two passes for each value.
        """
        show = self._show_master if self.master_weights else lambda _: None
        return [{"params": [show(param) for param in group["params"]]} for group in self.param_groups]

    def _show_master(self, param: Tensor) -> Tensor:
        master = self._working_copy(param)
        if param.dtype in HALF_TYPES:
            self._shown.setdefault(param, param.detach().clone())
        return master

    def step(
        self,
        closure: Callable[[], object] | None = None,
        grads: object = None,
        output_params: object = None,
        scale: object = None,
        grad_norms: object = None,
    ) -> object:
        """Updates the parameters that have gradients; returns what the closure returns.

        Raises AmpError for the other arguments, which apex gave up in 2019.
        """
        if any(argument is not None for argument in (grads, output_params, scale, grad_norms)):
            raise amp.AmpError(
                "FusedAdam.step no longer takes grads=, output_params=, scale= and grad_norms=: set the "
                ".grad of the parameters and call step(), or let amp or FP16_Optimizer scale and clip"
            )
        return super().step(closure)

    def _batches(self, group: Group, params: Sequence[Tensor]) -> list[Batch]:
        batches = super()._batches(group, params)
        divisor = clip_divisor([param.grad for param in params], self.max_grad_norm)
        for batch in batches if divisor is not None else ():
            batch.grads = [grad / divisor.to(grad.device) for grad in batch.grads]
        return batches

    def _update(self, group: Group, batch: Batch) -> None:
        fused = self._fused_options(batch)
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if self.amsgrad else 2]
        steps = self._steps(batch, fused)
        steps = steps if group["bias_correction"] else _count(steps, fused["found_inf"])
        moments = [self._moments(name, batch) for name in names]
        adam_([batch.grads, batch.params, *moments], steps, group, self.adam_w_mode == 1, **fused)


def _count(steps: list[Tensor], found_inf: Tensor | None) -> list[Tensor]:
    """Counts a step, and returns counts with which torch corrects nothing: infinitely many."""
    torch._foreach_add_(steps, 1.0)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf.to(step.device) for step in steps])
    return [torch.full_like(step, float("inf")) for step in steps]

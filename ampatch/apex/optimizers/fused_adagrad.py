"""FusedAdagrad: Adagrad by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad

from ampatch.apex.multi_tensor_apply.optimizer_kernels import multi_tensor_adagrad
from ampatch.apex.optimizers.batch import Batch, can_fuse
from ampatch.apex.optimizers.fused_optimizer import CountingOptimizer, Group, check_positive


class FusedAdagrad(CountingOptimizer):
    """Adagrad with the arguments that apex's FusedAdagrad had; `adagrad_w_mode` decays weights apart."""

    fused_devices = ("cpu", "cuda")
    multi_tensor_adagrad = staticmethod(multi_tensor_adagrad)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        check_positive("FusedAdagrad", lr=lr, eps=eps, weight_decay=weight_decay)
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        defaults = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step takes `found_inf`, and skips on the device."""
        return self._can_fuse and not self.adagrad_w_mode

    def _update(self, group: Group, batch: Batch) -> None:
        fused = can_fuse(batch.params[0], self.fused_devices)
        if self.adagrad_w_mode and group["weight_decay"]:
            # w - lr * (update + wd * w), where the update does not depend on w.
            torch._foreach_mul_(batch.params, 1 - group["lr"] * group["weight_decay"])
        adagrad(
            batch.params,
            batch.grads,
            self._moments("sum", batch),
            self._steps(batch, fused),
            fused=fused or None,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(param.is_complex() for param in batch.params),
            lr=group["lr"],
            weight_decay=0.0 if self.adagrad_w_mode else group["weight_decay"],
            lr_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )

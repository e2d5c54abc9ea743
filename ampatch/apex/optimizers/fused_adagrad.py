"""FusedAdagrad: Adagrad by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

from torch.optim.adagrad import adagrad

from ampatch.apex.optimizers.fused_optimizer import Batch, CountingOptimizer, Group, Params, decay_apart


class FusedAdagrad(CountingOptimizer):
    """Adagrad with the arguments that apex's FusedAdagrad had; `adagrad_w_mode` decays weights apart."""

    fused_devices = ("cpu", "cuda")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        adagrad_w_mode: bool = False,
    ) -> None:
        self.adagrad_w_mode = 1 if adagrad_w_mode else 0
        self.takes_scaled_grads = not adagrad_w_mode
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    def _update(self, group: Group, batch: Batch) -> None:
        fused = self._fused_options(batch)
        adagrad(
            batch.params,
            batch.grads,
            self._moments("sum", batch),
            self._steps(batch, fused),
            lr=group["lr"],
            eps=group["eps"],
            weight_decay=decay_apart(batch.params, group, bool(self.adagrad_w_mode)),
            lr_decay=0.0,
            has_complex=any(param.is_complex() for param in batch.params),
            maximize=False,
            **fused,
        )

"""FusedAdagrad: Adagrad by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

from ampatch.apex.multi_tensor_apply.updates import adagrad_
from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_optimizer import CountingOptimizer, Group, Params


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
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay}, set_grad_none)

    @property
    def _takes_scaled_grads(self) -> bool:
        return not self.adagrad_w_mode

    def _update(self, group: Group, batch: Batch) -> None:
        fused = self._fused_options(batch)
        steps = self._steps(batch, fused)
        adagrad_(self._lists(batch, "sum"), steps, group, bool(self.adagrad_w_mode), **fused)

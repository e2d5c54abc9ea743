"""FusedSGD: SGD by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

import warnings

from torch import Tensor

import ampatch as amp
from ampatch.apex.multi_tensor_apply.updates import sgd_
from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_optimizer import FusedOptimizer, Group, Params


class FusedSGD(FusedOptimizer):
    """SGD with the arguments that apex's FusedSGD had.

    With `wd_after_momentum` weights decay apart from the momentum. `materialize_master_grads=False`
    saved apex a copy of the gradients at O2; it has no meaning here, which a warning says.
    """

    fused_devices = ("cpu", "cuda", "xpu", "mps")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise amp.AmpValueError(
                f"FusedSGD: nesterov=True with momentum={momentum!r} and dampening={dampening!r}: "
                f"expected a momentum above 0 and a dampening of 0"
            )
        if not materialize_master_grads:
            warnings.warn(
                "FusedSGD: materialize_master_grads=False has no meaning with ampatch and is ignored",
                stacklevel=2,
            )
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {**defaults, "weight_decay": weight_decay}, set_grad_none)

    @property
    def _takes_scaled_grads(self) -> bool:
        return not self.wd_after_momentum

    def _update(self, group: Group, batch: Batch) -> None:
        if group["momentum"] == 0:
            self._run(group, batch, [None] * len(batch.params))
            return
        new = [index for index, owner in enumerate(batch.owners) if self._is_new(owner)]
        old = sorted({*range(len(batch.owners))} - {*new})
        if old:
            part = batch.select(old)
            self._run(group, part, self._moments("momentum_buffer", part))
        found_inf = getattr(self, "found_inf", None)
        # Torch's kernel would skip, and leave a new momentum uninitialized: one host sync, once.
        if new and (found_inf is None or not found_inf):
            part, buffers = batch.select(new), [None] * len(new)
            self._run(group, part, buffers)
            for owner, buffer in zip(part.owners, buffers, strict=True):
                self.state[owner]["momentum_buffer"] = buffer

    def _is_new(self, owner: Tensor) -> bool:
        return self.state.get(owner, {}).get("momentum_buffer") is None

    def _run(self, group: Group, batch: Batch, buffers: list[Tensor | None]) -> None:
        fused = self._fused_options(batch)
        sgd_(batch.grads, batch.params, buffers, group, self.wd_after_momentum, **fused)

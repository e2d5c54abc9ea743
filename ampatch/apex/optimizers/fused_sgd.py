"""FusedSGD: SGD by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.sgd import sgd

import ampatch as amp
from ampatch.apex.multi_tensor_apply.optimizer_kernels import multi_tensor_sgd
from ampatch.apex.optimizers.batch import Batch, can_fuse
from ampatch.apex.optimizers.fused_optimizer import FusedOptimizer, Group, check_positive


class FusedSGD(FusedOptimizer):
    """SGD with the arguments that apex's FusedSGD had.

    With `wd_after_momentum` weights decay apart from the momentum. `materialize_master_grads=False`
    saved apex a copy of the gradients at O2; it has no meaning here, which a warning says.
    """

    fused_devices = ("cpu", "cuda", "xpu", "mps")
    multi_tensor_sgd = staticmethod(multi_tensor_sgd)

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float | Tensor | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        check_positive("FusedSGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
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
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__(params, defaults, set_grad_none=set_grad_none)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a step takes `found_inf`, and skips on the device."""
        return self._can_fuse and not self.wd_after_momentum

    def _update(self, group: Group, batch: Batch) -> None:
        if group["momentum"] == 0:
            self._run(group, batch, [None] * len(batch.params))
            return
        new = [index for index, owner in enumerate(batch.owners) if self._is_new(owner)]
        old = sorted(set(range(len(batch.owners))) - set(new))
        for part, is_new in ((batch.select(old), False), (batch.select(new), True)):
            if part.owners and not (is_new and self._overflowed()):
                self._run(group, part, self._buffers(part, is_new))

    def _is_new(self, owner: Tensor) -> bool:
        return self.state.get(owner, {}).get("momentum_buffer") is None

    def _overflowed(self) -> bool:
        # Torch's kernel would skip, and leave a new momentum uninitialized: one host sync, once.
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf)

    def _buffers(self, batch: Batch, is_new: bool) -> list[Tensor | None]:
        return [None] * len(batch.owners) if is_new else list(self._moments("momentum_buffer", batch))

    def _run(self, group: Group, batch: Batch, buffers: list[Tensor | None]) -> None:
        fused = can_fuse(batch.params[0], self.fused_devices)
        if self.wd_after_momentum and group["weight_decay"]:
            # w - lr * (update + wd * w), where the update does not depend on w.
            torch._foreach_mul_(batch.params, 1 - group["lr"] * group["weight_decay"])
        sgd(
            batch.params,
            batch.grads,
            buffers,
            fused=fused or None,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            weight_decay=0.0 if self.wd_after_momentum else group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
        )
        for owner, buffer in zip(batch.owners, buffers, strict=True):
            if buffer is not None:
                self.state[owner]["momentum_buffer"] = buffer

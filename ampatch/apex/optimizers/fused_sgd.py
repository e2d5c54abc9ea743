"""FusedSGD: SGD by torch's own functions, fused where the device has the kernel."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor
from torch.optim.sgd import sgd

import ampatch as amp
from ampatch.apex.optimizers.fused_optimizer import Batch, FusedOptimizer, Group, Params, decay_apart


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
        self.takes_scaled_grads = not wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, {**defaults, "weight_decay": weight_decay}, set_grad_none)

    def _step_group(self, group: Group, params: Sequence[Tensor]) -> None:
        # Torch's kernels take parameters that have a momentum, or such that have none yet.
        old, new = [], []
        for param in params:
            has_none = self.state.get(param, {}).get("momentum_buffer") is None
            (new if has_none else old).append(param)
        if old:
            super()._step_group(group, old)
        found_inf = getattr(self, "found_inf", None)
        # Torch's kernel would skip, and leave a new momentum uninitialized: one host sync, once.
        if new and (group["momentum"] == 0 or found_inf is None or not found_inf):
            super()._step_group(group, new)

    def _update(self, group: Group, batch: Batch) -> None:
        states = [self.state[owner] for owner in batch.owners] if group["momentum"] else []
        buffers = [None] * len(batch.params)
        if states and states[0].get("momentum_buffer") is not None:
            buffers = self._moments("momentum_buffer", batch)
        sgd(
            batch.params,
            batch.grads,
            buffers,
            **{name: group[name] for name in ("lr", "momentum", "dampening", "nesterov")},
            weight_decay=decay_apart(batch.params, group, self.wd_after_momentum),
            maximize=False,
            **self._fused_options(batch),
        )
        for state, buffer in zip(states, buffers, strict=False):
            state["momentum_buffer"] = buffer

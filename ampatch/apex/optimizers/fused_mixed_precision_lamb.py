"""FusedMixedPrecisionLamb: LAMB over half parameters that keeps float32 ones beside them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ampatch.apex.optimizers.batch import Batch
from ampatch.apex.optimizers.fused_lamb import FusedLAMB
from ampatch.apex.optimizers.fused_optimizer import Group


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB that steps float32 copies of half parameters, and takes a GradScaler's scaled half gradients.

    `step` is the number of steps done before. Copies are kept for every half parameter:
    `reduced_precision_dtype`, by which apex found them, is accepted and not needed.
    """

    # A GradScaler then hands its scale to the step, which float16 gradients need.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        lr: float | Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float | None = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay,
            amsgrad,
            adam_w_mode,
            grad_averaging,
            max_grad_norm=max_grad_norm,
            use_nvlamb=use_nvlamb,
        )
        self.master_weights = True
        for group in self.param_groups:
            group.setdefault("step", int(step))

    def _step(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not bool(found_inf):  # one host sync with a GradScaler
            super()._step()

    def _prepare(self, batches: list[Batch]) -> None:
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            for batch in batches:
                batch.grads = [grad / scale.to(grad.device) for grad in batch.grads]
        super()._prepare(batches)

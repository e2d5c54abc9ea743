"""FP16_Optimizer with the names that it had next to apex's first FusedAdam."""

from __future__ import annotations

from torch.nn import Parameter

from ampatch.apex import fp16_utils


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """Wraps a fused optimizer over half parameters; that of `fp16_utils` but for a few names.

    Gradients are clipped by a FusedAdam that was made with `max_grad_norm`.
    """

    def zero_grad(self, set_grads_to_None: bool = True, set_to_none: bool | None = None) -> None:
        """Clears the gradients of the model and of the masters: to None, unless told to zero."""
        super().zero_grad(set_grads_to_None, set_to_none)

    @property
    def cur_scale(self) -> float:
        """The loss scale."""
        return self.loss_scale

    @property
    def fp32_groups(self) -> list[list[Parameter]]:
        """The float32 masters of half parameters, by param group."""
        return self.fp32_from_fp16_groups

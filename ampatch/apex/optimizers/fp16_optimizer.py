"""FP16_Optimizer with the names that it had next to apex's first FusedAdam."""

from __future__ import annotations

from torch.nn import Parameter

from ampatch.apex import fp16_utils
from ampatch.apex.fp16_utils.fp16_optimizer import attribute_of


class FP16_Optimizer(fp16_utils.FP16_Optimizer):
    """Wraps a fused optimizer over half parameters; that of `fp16_utils` but for a few names.

    Gradients are clipped by a FusedAdam that was made with `max_grad_norm`.
    """

    cur_scale = attribute_of("loss_scaler", "cur_scale")
    cur_iter = attribute_of("loss_scaler", "cur_iter", 0)
    last_overflow_iter = attribute_of("loss_scaler", "last_overflow_iter")
    scale_factor = attribute_of("loss_scaler", "scale_factor")
    scale_window = attribute_of("loss_scaler", "scale_window")

    def zero_grad(self, set_grads_to_None: bool = True, set_to_none: bool | None = None) -> None:
        """Clears the gradients of the model and of the masters: to None, unless told to zero."""
        super().zero_grad(set_grads_to_None, set_to_none)

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        halves = {id(pair.master): pair.half for pair in self._masters}
        return [[halves.get(id(param), param) for param in group] for group in self.fp32_groups]

    @property
    def fp32_groups(self) -> list[list[Parameter]]:
        """What is stepped for them, in the same order: masters, and parameters that are float32."""
        return [group["params"] for group in self.param_groups]

    def state_dict(self) -> dict[str, object]:
        """Returns the state of the inner optimizer, what is stepped and the loss scaler, in apex's format."""
        return {
            **{"dynamic_loss_scale": self.dynamic_loss_scale, "cur_iter": 0, **vars(self.loss_scaler)},
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_groups": self.fp32_groups,
        }

"""The AdamW that transformers had up to version 4.49, step for step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with weight decay apart, and with the arguments and the state that transformers' had.

    It differs from torch's in where `eps` is added (before the bias is corrected), in what decays (the
    weight after the update) and in `correct_bias=False`, as BERT was trained.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        correct_bias: bool = True,
        no_deprecation_warning: bool = False,
    ) -> None:
        if lr < 0 or eps < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr={lr!r}, betas={betas!r}, eps={eps!r}: expected 0 or more, betas below 1")
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "correct_bias": correct_bias})

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Updates the parameters that have gradients; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group)
        return loss

    def _update(self, param: Tensor, group: dict) -> None:
        if param.grad.is_sparse:
            raise RuntimeError("AdamW does not take sparse gradients: use torch.optim.SparseAdam")
        state, (beta1, beta2) = self.state[param], group["betas"]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        state["step"] += 1
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(param.grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        size = group["lr"]
        if group["correct_bias"]:
            size *= (1 - beta2 ** state["step"]) ** 0.5 / (1 - beta1 ** state["step"])
        param.addcdiv_(mean, square.sqrt().add_(group["eps"]), value=-size)
        if group["weight_decay"] > 0:
            param.add_(param, alpha=-group["lr"] * group["weight_decay"])

"""Layer-wise adaptive rates: an optimizer's step, scaled for each parameter by its own size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.apex.amp_C import compute_type


class LARC:
    """Wraps an optimizer, and gives each parameter a rate in proportion to its norm.

    With the norm |p| of a parameter, |g| of its gradient and the weight decay w the rate is
    `trust_coefficient * |p| / (|g| + w * |p| + eps)` (You, Gitman and Ginsburg 2017, arXiv:1708.03888).
    The learning rate is multiplied by it, or with `clip` replaced by it where the rate is lower. A parameter
    whose norm is zero, or whose gradient's is, is stepped as without LARC and without weight decay.

    It is no Optimizer: schedulers take `larc.optim`. Gradients are changed in place at the step, after
    they are unscaled. A skipped step leaves them as they are, unless the optimizer is a fused one, which
    skips on the device; but then they are not finite anyway.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.clip = clip
        self.eps = eps

    def __repr__(self) -> str:
        return repr(self.optim)

    def __getattr__(self, name: str) -> object:
        """Returns what the optimizer inside has: `state`, `state_dict`, `zero_grad` and so on."""
        if name == "optim" or name.startswith("_"):  # unpickling asks before there is an optimizer
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> list[dict]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict]) -> None:
        self.optim.param_groups = value

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Scales the gradients and steps; waits for no device.

        The gradients of a closure are scaled each time that it runs.
        """
        with self._absorbed_weight_decay() as decays:
            if closure is not None:
                return self.optim.step(functools.partial(self._run, closure, decays))
            if not hasattr(self.optim, "_optimizer_step_pre_hooks"):
                self.scale_grads_(decays)  # of a wrapper, which runs no hooks
                return self.optim.step()
            # Inside of the step, after the hooks that unscale gradients and skip it.
            hook = self.optim.register_step_pre_hook(_Adapt(self, decays))
            try:
                return self.optim.step()
            finally:
                hook.remove()

    def _run(self, closure: Callable[[], object], weight_decays: list[float]) -> object:
        result = closure()
        self.scale_grads_(weight_decays)
        return result

    @contextmanager
    def _absorbed_weight_decay(self) -> Iterator[list[float]]:
        """Takes weight decay from the optimizer for the time of a step: the rates contain it."""
        groups = [group for group in self.optim.param_groups if "weight_decay" in group]
        own_decays = [group["weight_decay"] for group in groups]
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        try:
            for group in groups:
                group["weight_decay"] = 0.0
            yield decays
        finally:
            for group, weight_decay in zip(groups, own_decays, strict=True):
                group["weight_decay"] = weight_decay

    @torch.no_grad()
    def scale_grads_(self, weight_decays: list[float]) -> None:
        """Adds weight decay to the gradients and multiplies them by the rates."""
        for group, weight_decay in zip(self.optim.param_groups, weight_decays, strict=True):
            for param in group["params"]:
                if param.grad is not None:
                    self._scale_grad_(param.detach(), param.grad.detach(), weight_decay, group["lr"])

    def _scale_grad_(self, param: Tensor, grad: Tensor, weight_decay: float, lr: float | Tensor) -> None:
        param_norm, grad_norm = _norm(param), _norm(grad)
        rate = self.trust_coefficient * param_norm / (grad_norm + param_norm * weight_decay + self.eps)
        if self.clip:
            rate = (rate / lr).clamp(max=1.0)
        is_adapted = (param_norm != 0) & (grad_norm != 0)
        grad.add_(param * (is_adapted.to(rate.dtype) * weight_decay))
        grad.mul_(torch.where(is_adapted, rate, 1.0))


def _norm(tensor: Tensor) -> Tensor:
    """Returns the norm, of half tensors in float32: their squares overflow."""
    return torch.linalg.vector_norm(tensor, dtype=compute_type(tensor.dtype))


class _Adapt:
    """Scales the gradients of one step, once: a class that calls its base's `step` runs hooks twice."""

    def __init__(self, larc: LARC, weight_decays: list[float]) -> None:
        self._larc, self._weight_decays = larc, weight_decays
        self._is_done = False

    def __call__(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self._is_done:
            self._is_done = True
            self._larc.scale_grads_(self._weight_decays)

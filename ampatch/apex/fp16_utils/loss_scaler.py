"""Loss scales for loops that scale by hand: a constant, and one that follows overflows.

The attributes are plain and have the names that apex gave them, for checkpoints hold these objects.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.apex.fp16_utils.fp16util import to_python_float
from ampatch.levels.loss_scale import LARGEST_SCALE
from ampatch.steps.scaler import Agreement, agree_, find_values

__all__ = ["DynamicLossScaler", "LossScaler", "to_python_float"]


class LossScaler:
    """A constant loss scale; nothing is checked and nothing skipped."""

    def __init__(self, scale: float = 1) -> None:
        self.cur_scale = scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Returns False: with a constant scale nobody looks."""
        return False

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return False

    def update_scale(self, overflow: bool) -> None:
        """Does nothing: the scale stays."""

    @property
    def loss_scale(self) -> float:
        return self.cur_scale

    def scale_gradient(
        self, module: Module, grad_in: tuple[Tensor | None, ...], grad_out: object
    ) -> tuple[Tensor | None, ...]:
        """Returns gradients times the scale; a backward hook for modules."""
        return tuple(None if grad is None else self.loss_scale * grad for grad in grad_in)

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)


class DynamicLossScaler(LossScaler):
    """A loss scale that is divided by `scale_factor` at an overflow, and grows after clean iterations.

    It grows by `scale_factor` after each `scale_window` iterations since the last overflow. An overflow
    does not take it below 1, or below `min_loss_scale` if that is given. The scale is a number of Python's,
    which other factors than powers of two round otherwise than the engine's, in float32.
    """

    # Objects from checkpoints of apex have no bounds of their own.
    min_loss_scale: float | None = None
    max_loss_scale: float | None = None

    def __init__(
        self,
        init_scale: float = 2**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_loss_scale: float | None = None,
        max_loss_scale: float | None = None,
    ) -> None:
        self.cur_scale = init_scale
        self.cur_iter = 0
        self.last_overflow_iter = -1
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.min_loss_scale = min_loss_scale
        self.max_loss_scale = max_loss_scale

    def has_overflow(self, params: Iterable[Tensor]) -> bool:
        """Whether any gradient of `params` has an element that is inf or NaN; one host sync."""
        params = list(params)
        finite = [_is_finite(param.grad) for param in params if param.grad is not None]
        device = finite[0].device if finite else params[0].device if params else None
        flags = [torch.ones((), dtype=torch.bool, device=device), *(flag.to(device) for flag in finite)]
        found_inf = 1.0 - torch.stack(flags).all().float()
        agree_(found_inf, Agreement().list_groups(params))
        return bool(found_inf)

    @staticmethod
    def _has_inf_or_nan(x: Tensor) -> bool:
        return not bool(_is_finite(x))

    def update_scale(self, overflow: bool) -> None:
        """Ends an iteration: backs off if it overflowed, grows if it was the last of a clean window."""
        if overflow:
            # A scale that began below 1 stays where it is.
            floor = min(1.0, self.cur_scale) if self.min_loss_scale is None else self.min_loss_scale
            self.cur_scale = max(self.cur_scale / self.scale_factor, floor)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            ceiling = LARGEST_SCALE if self.max_loss_scale is None else self.max_loss_scale
            self.cur_scale = max(self.cur_scale, min(self.cur_scale * self.scale_factor, ceiling))
        self.cur_iter += 1


def _is_finite(grad: Tensor) -> Tensor:
    """Looks at every element: the sum of finite ones may well be inf."""
    return torch.isfinite(find_values(grad.detach())).all()


# Checkpoints hold these objects, under the name that apex gave them or under ours, and `torch.load`
# takes only classes that it knows. They are plain: to load one runs nothing.
torch.serialization.add_safe_globals(
    [
        (kind, f"{package}.fp16_utils.loss_scaler.{kind.__name__}")
        for kind in (LossScaler, DynamicLossScaler)
        for package in ("apex", "ampatch.apex")
    ]
)

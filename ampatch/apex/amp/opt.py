"""The wrapper around an optimizer that `amp_handle.wrap_optimizer` returned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.nn import ParameterList
from torch.optim import Optimizer

import ampatch as amp
from ampatch.levels.stack import LOG_ALONE


class OptimWrapper:
    """An optimizer with a `scale_loss` of its own, each loss of an iteration with a scale of its own.

    Everything else is the wrapped optimizer's. `loss_scale` None scales nothing.
    """

    def __init__(self, optimizer: Optimizer, num_loss: int, loss_scale: float | str | None) -> None:
        self.wrapped = optimizer
        self._num_loss = num_loss
        self._loss_idx = 0
        self._is_enabled = loss_scale is not None
        if loss_scale is not None:
            params = [param for group in optimizer.param_groups for param in group["params"]]
            amp.initialize(
                ParameterList(params),
                optimizer,
                opt_level="O1",
                loss_scale=loss_scale,
                num_losses=num_loss,
                verbosity=LOG_ALONE,
                allow_half_params=True,
            )

    def scale_loss(self, loss: Tensor, turn: bool = True) -> AbstractContextManager[Tensor]:
        """Yields the loss times a scale: each call in an iteration takes the next of `num_loss`."""
        if not self._is_enabled:
            return nullcontext(loss)
        loss_id = self._loss_idx if turn else 0
        self._loss_idx += turn
        return amp.scale_loss(loss, self.wrapped, loss_id=loss_id)

    def step(self, closure: Callable[[], object] | None = None) -> object:
        """Steps, unless a gradient overflowed; the next loss is the first of an iteration again."""
        self._loss_idx = 0
        return self.wrapped.step() if closure is None else self.wrapped.step(closure)

    def __getattr__(self, name: str) -> object:
        if name == "wrapped":  # not set yet: unpickling asks for names first
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    def __repr__(self) -> str:
        return f"OptimWrapper({self.wrapped!r})"

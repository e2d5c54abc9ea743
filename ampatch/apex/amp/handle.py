"""`scale_loss`, `disable_casts`, and the handle that `amp.init` returned before there was `initialize`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import ParameterList
from torch.optim import Optimizer

import ampatch as amp
from ampatch.levels.stack import LOG_ALONE

disable_casts = amp.disable_casts


def scale_loss(
    loss: Tensor,
    optimizers: object,
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> AbstractContextManager[Tensor]:
    """Yields the scaled loss, as `ampatch.scale_loss` does; the scaler is one of the last `initialize`."""
    return amp.scale_loss(
        loss, optimizers, loss_id, model, delay_unscale, delay_overflow_check, of_last_call=True
    )


class AmpHandle:
    """Steers the casts of the session: apex's `_amp_state.handle`, and what `amp.init` returns."""

    has_cache = True

    def __init__(self, loss_scale: float | str | None = "dynamic", verbose: bool = False) -> None:
        self.verbose = verbose
        self._loss_scale = loss_scale
        self._wrappers: WeakSet[OptimWrapper] = WeakSet()
        self._is_over = False
        self._off = ExitStack()
        self._is_off = False

    def is_active(self) -> bool:
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return not (self._is_off or self._is_over)

    @_is_active.setter
    def _is_active(self, value: bool) -> None:
        self._off.close()
        if not value:
            self._off.enter_context(amp.disable_casts())
        self._is_off = not value

    def _disable_casts(self) -> AbstractContextManager[None]:
        return amp.disable_casts()

    def _clear_cache(self) -> None:
        amp.clear_cache()

    def _deactivate(self) -> None:
        """Gives torch its functions back, until the next `init` or `initialize`; the rest goes on."""
        self.close()
        amp.uninitialize(functions_only=True)

    def close(self) -> None:
        """Turns casts off no more: what is patched from now on is not its own."""
        self._is_active = True
        self._is_over = True

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Returns an optimizer with a `scale_loss` of its own; losses take turns within an iteration."""
        wrapper = OptimWrapper(optimizer, num_loss, self._loss_scale)
        self._wrappers.add(wrapper)
        optimizer._amp_wrapper = wrapper  # which lives as long, though nobody else may keep it
        return wrapper

    def scale_loss(self, loss: Tensor, optimizer: object) -> AbstractContextManager[Tensor]:
        """Yields the scaled loss; the optimizer need not have been wrapped."""
        wrapper = getattr(optimizer, "_amp_wrapper", None)
        if wrapper not in self._wrappers:
            wrapper = self.wrap_optimizer(optimizer)
        return wrapper.scale_loss(loss, turn=optimizer is wrapper)


class NoOpHandle(AmpHandle):
    """Stands for a handle where amp is disabled: everything passes."""

    has_cache = False

    def __init__(self) -> None:
        super().__init__(loss_scale=None)
        self._is_over = True

    def _clear_cache(self) -> None:
        """Does nothing."""

    def _deactivate(self) -> None:
        """Does nothing."""


# ---- The wrapper around an optimizer that `wrap_optimizer` returns ----


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

"""`scale_loss`, `disable_casts`, and the handle that `amp.init` returned before there was `initialize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor

import ampatch as amp
from ampatch.apex.amp.opt import OptimWrapper

scale_loss = amp.scale_loss
disable_casts = amp.disable_casts


class AmpHandle:
    """Steers the casts of the session: apex's `_amp_state.handle`, and what `amp.init` returns."""

    has_cache = True

    def __init__(self, loss_scale: float | str = "dynamic", verbose: bool = False) -> None:
        self.verbose = verbose
        self._loss_scale = loss_scale
        self._wrappers: list[OptimWrapper] = []
        self._off = ExitStack()
        self._is_off = False

    def is_active(self) -> bool:
        """Whether functions cast, in this thread."""
        return self._is_active

    @property
    def _is_active(self) -> bool:
        return not self._is_off

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
        """Stops casting; `ampatch.uninitialize` also undoes the rest."""
        self._is_active = False

    def close(self) -> None:
        """Lets functions cast again, should a session be opened later."""
        self._is_active = True

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Returns an optimizer with a `scale_loss` of its own; losses take turns within an iteration."""
        wrapper = OptimWrapper(optimizer, num_loss, self._loss_scale)
        self._wrappers.append(wrapper)
        return wrapper

    def scale_loss(self, loss: Tensor, optimizer: object) -> AbstractContextManager[Tensor]:
        """Yields the scaled loss; the optimizer need not have been wrapped."""
        for wrapper in self._wrappers:
            if optimizer in (wrapper, wrapper.wrapped):
                return wrapper.scale_loss(loss, turn=optimizer is wrapper)
        return self.wrap_optimizer(optimizer).scale_loss(loss, turn=False)


class NoOpHandle:
    """Stands for a handle where amp is disabled: everything passes."""

    has_cache = False
    verbose = False
    _is_active = False

    def is_active(self) -> bool:
        """Returns False."""
        return False

    @contextmanager
    def _disable_casts(self) -> Iterator[None]:
        yield

    def _clear_cache(self) -> None:
        """Does nothing."""

    def _deactivate(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, num_loss: int = 1) -> OptimWrapper:
        """Returns a wrapper whose losses stay what they are."""
        return OptimWrapper(optimizer, num_loss, None)

    @contextmanager
    def scale_loss(self, loss: Tensor, optimizer: object) -> Iterator[Tensor]:
        """Yields the loss itself."""
        yield loss

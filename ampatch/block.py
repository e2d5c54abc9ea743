"""One block of `scale_loss`: what happens before and after its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor

from ampatch.optimizer import AmpOptimizer
from ampatch.scaler import LossScaler


class ScaledLoss:
    """The context manager that `scale_loss` returns; yields the scaled loss.

    On the way out the gradients made inside are unscaled, checked and added to earlier ones, and
    the scale is updated; nothing of it waits for the device. A block that raises leaves the
    gradients as they were before it.
    """

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[AmpOptimizer],
        scaler: LossScaler,
        others: Sequence[AmpOptimizer],
        end_iteration: Callable[[], None],
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss = loss
        self._optimizers = optimizers
        self._scaler = scaler
        self._others = others
        self._end_iteration = end_iteration
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check

    def __enter__(self) -> Tensor:
        scaled = self._scaler.scale(self._loss)
        for optimizer in self._optimizers:
            optimizer.prepare_backward(self._scaler)
        return scaled

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_iteration()
        if kind is not None:
            for optimizer in self._optimizers:
                optimizer.discard_grads(self._scaler)
        elif self._delay_unscale:
            for optimizer in self._optimizers:
                optimizer.delay(self._scaler)
        else:
            self._unscale()

    def _unscale(self) -> None:
        scaler = self._scaler
        # Gradients that an earlier block left scaled must be settled before the scale changes.
        waiting = [other for other in self._others if other.delayed is scaler]
        optimizers = {id(optimizer): optimizer for optimizer in [*self._optimizers, *waiting]}.values()
        found_inf = scaler.new_found_inf()
        for optimizer in optimizers:
            optimizer.unscale(scaler, found_inf)
        if scaler.is_dynamic:
            outcome = scaler.finish(found_inf, update=not self._delay_overflow_check)
            for optimizer in optimizers:
                optimizer.note(outcome)

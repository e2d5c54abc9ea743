"""One block of `scale_loss`: what happens before and after its backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampatch.errors import AmpError
from ampatch.levels.private import graph_task
from ampatch.steps.captured import CapturedBlock, CapturedGrads
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.scaler import LossScaler, Scale

if TYPE_CHECKING:
    from ampatch.session.misuse.misuse import ScaleWatch


class ScaledLoss:
    """The context manager that `scale_loss` returns; yields the scaled loss.

    On the way out the gradients made inside are unscaled, checked and added to earlier ones, and
    the scale is updated; nothing of it waits for the device. A block that raises leaves the
    gradients as they were before it (see `AmpOptimizer.discard_grads` for the exception).
    """

    def __init__(
        self,
        loss: Tensor,
        optimizers: Sequence[AmpOptimizer],
        scaler: LossScaler,
        end_iteration: Callable[[], None],
        tell_end: Callable[[int], None] | None,
        watch: ScaleWatch,
        capture: list[Callable[[], None]] | None = None,
        *,
        delay_unscale: bool,
        delay_overflow_check: bool,
    ) -> None:
        self._loss = loss
        self._optimizers = optimizers
        self._scaler = scaler
        self._scale: Scale | None = None
        self._is_over = False
        self._around = -1
        self._end_iteration = end_iteration
        self._tell_end = tell_end
        self._watch = watch
        self._delay_unscale = delay_unscale
        self._delay_overflow_check = delay_overflow_check
        self._capture = capture  # collects what the replay of a CUDA graph must repeat

    def __enter__(self) -> Tensor:
        self._scale = self._scaler.begin(self._loss.device, self._capture)
        self._around = graph_task()  # a backward that the block itself is inside of
        for optimizer in self._optimizers:
            optimizer.prepare_backward(self._scale, self._end_by_step)
        loss = self._loss
        scaled = self._scale.scale(loss if loss.dtype is torch.float32 else loss.float())
        self._watch.begin_block(self, scaled, self._scale, self._optimizers)
        return scaled

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._end()
        elif not self._is_over:
            self._close()
            for optimizer in self._optimizers:
                optimizer.discard_grads(self._scale)
            for optimizer in self._optimizers:  # two of them may step one parameter
                optimizer.restore_grads()

    def _end_by_step(self) -> None:
        """Ends the block at a step inside it.

        Raises AmpError for a step inside of its backward, unless the scale is a static 1: gradients that
        are still to come would be scaled, and who steps then could not see an overflow of theirs.
        """
        if graph_task() != self._around and not self._scale.is_identity:
            raise AmpError(
                "scale_loss: an optimizer's step ran inside of backward, where gradients are still scaled: "
                "step after the block, or use loss_scale=1.0 (the default of O4 and O5)"
            )
        self._end()

    def _end(self) -> None:
        """Unscales what the block made, once."""
        if self._is_over:
            return
        self._close()
        outcome = None
        delays = self._delay_unscale or any(optimizer.local.coming for optimizer in self._optimizers)
        if delays:
            for optimizer in self._optimizers:
                optimizer.delay(self._scale)
        else:
            outcome = self._unscale()
        if self._capture is not None:
            grads = list(map(CapturedGrads, self._optimizers))
            delayed, update = self._scale if delays else None, not self._delay_overflow_check
            self._capture.append(CapturedBlock(grads, outcome, self._scaler, delayed, update))
        if self._tell_end is not None:
            self._tell_end(self._scaler.loss_id)

    def _close(self) -> None:
        self._is_over = True
        self._end_iteration()
        for optimizer in self._optimizers:
            optimizer.end_block = None
        self._watch.end_block(self)

    def _unscale(self) -> BackwardOutcome | None:
        was_delayed = any(optimizer.delayed is not None for optimizer in self._optimizers)
        looks = self._scaler.is_dynamic or not self._scale.is_identity
        found_inf = self._scaler.new_found_inf() if looks else None
        # Gradients of parameters that two of the optimizers share.
        done: set[int] | None = set() if len(self._optimizers) > 1 else None
        for optimizer in self._optimizers:
            optimizer.unscale(self._scale, found_inf, done)
        for optimizer in self._optimizers:
            optimizer.end_backward()
        if not self._scaler.is_dynamic:
            return None
        outcome = self._scaler.finish(
            found_inf,
            None if was_delayed else _as_number(self._loss.detach()),
            update=not self._delay_overflow_check,
            capture=self._capture,
        )
        for optimizer in self._optimizers:
            optimizer.note(outcome)
        return outcome


def _as_number(loss: Tensor) -> Tensor | None:
    """Returns the loss, or its sum, to be kept beside the outcome; None for one that wraps others."""
    if type(loss) is not Tensor:
        return None
    return loss.sum() if loss.dim() else loss

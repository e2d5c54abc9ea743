"""One block of `scale_loss`: what happens before and after its backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from ampatch.errors import AmpError, AmpTypeError, NotInitializedError
from ampatch.levels.private import graph_task
from ampatch.steps.captured import CapturedBlock, CapturedGrads
from ampatch.steps.events import Surroundings
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.scaler import LossScaler, Scale


class NotYetScaled:
    """What `scale_loss` returns has no `backward`: what its block yields has one."""

    def backward(self, *_: object, **__: object) -> NoReturn:
        """Raises AmpTypeError, which says how to write it."""
        raise AmpTypeError(
            "scale_loss(...).backward(): scale_loss returns a context manager: write "
            "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
        )


class PassedThrough(NotYetScaled, nullcontext[Tensor]):
    """Yields the loss as it is, where ampatch is not enabled."""


@dataclass(eq=False)
class ScaledLoss(NotYetScaled):
    """The context manager that `scale_loss` returns; yields the scaled loss.

    On the way out the gradients made inside are unscaled, checked and added to earlier ones, and
    the scale is updated; nothing of it waits for the device. A block that raises leaves the
    gradients as they were before it (see `AmpOptimizer.discard_grads` for the exception).
    """

    loss: Tensor
    optimizers: Sequence[AmpOptimizer]
    scaler: LossScaler
    around: Surroundings
    delay_unscale: bool
    delay_overflow_check: bool
    scale: Scale | None = None
    scaled: Tensor | None = None
    is_over: bool = False

    def __enter__(self) -> Tensor:
        try:
            return self._begin()
        except BaseException:  # then nobody calls __exit__
            for optimizer in [one for one in self.optimizers if one.end_block == self._end_early]:
                optimizer.end_block = None
                optimizer.restore_grads()
            self._tell_end()
            raise

    def _begin(self) -> Tensor:
        loss, optimizers = self.loss, self.optimizers
        self._capture = self.around.capture()  # what the replay of a CUDA graph must repeat
        self._is_plain = (
            self._capture is None and self.scaler.is_identity and all(map(_has_nothing_to_do, optimizers))
        )
        self.scale = self._prepare()
        self.scaled = self.scale.scale(loss if loss.dtype is torch.float32 else loss.float())
        self.around.begin_block(not self.scale.is_identity)
        self.around.events.block_begins(self)
        return self.scaled

    def _prepare(self) -> Scale:
        """Prepares the optimizers for backward passes; returns what these are scaled by."""
        if self._is_plain:
            for optimizer in self.optimizers:
                optimizer.end_block = self._end_early
            return self.scaler.begin(self.loss.device)
        for optimizer in self.optimizers:
            _validate_open(optimizer)
        held = [scale for one in self.optimizers if (scale := one.held_scale()) is not None]
        if held and held[0].capture is self._capture:
            scale, self.scaler = held[0], held[0].scaler
        else:
            scale = self.scaler.begin(self.loss.device, self._capture)
        self._around = graph_task()  # a backward that the block itself is inside of
        for optimizer in self.optimizers:
            optimizer.prepare_backward(scale, self._end_early)
        return scale

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        elif not self.is_over:
            self._close(self._discard)

    def _discard(self) -> None:
        for optimizer in self.optimizers:
            optimizer.discard_grads(self.scale)
        for optimizer in self.optimizers:  # two of them may step one parameter
            optimizer.restore_grads()

    def _end_early(self, *, by_step: bool = True) -> None:
        """Ends the block at a step inside it, or at `uninitialize`.

        Raises AmpError inside of its backward, unless the scale is a static 1: gradients that
        are still to come would be scaled, and who steps then could not see an overflow of theirs.
        """
        if not self.scale.is_identity and graph_task() != self._around:
            place = "inside of backward, where gradients are still scaled"
            raise AmpError(
                f"scale_loss: an optimizer's step ran {place}: "
                f"step after the block, or use loss_scale=1.0 (the default of O4 and O5)"
                if by_step
                else f"uninitialize() was called {place}: call it after the block of scale_loss"
            )
        if by_step:
            self._end()
        else:
            self._close(functools.partial(self._settle, agrees=False))

    def _end(self) -> None:
        """Unscales what the block made, once."""
        if self.is_over:
            return
        try:
            self._close(self._settle)
        except BaseException:  # Ctrl-C, say: some gradients may still be scaled
            self._close(self._discard)
            raise
        self.around.events.block_ended(self)

    def _settle(self, *, agrees: bool = True) -> None:
        outcome = None
        delays = self.delay_unscale or any(optimizer.local.are_coming() for optimizer in self.optimizers)
        if delays:
            for optimizer in self.optimizers:
                optimizer.delay(self.scale)
        else:
            outcome = self._unscale(agrees)
        if self._capture is not None:
            grads = list(map(CapturedGrads, self.optimizers))
            delayed, update = self.scale if delays else None, not self.delay_overflow_check
            self._capture.append(CapturedBlock(grads, outcome, self.scaler, delayed, update))

    def _close(self, settle: Callable[[], None]) -> None:
        self.is_over = True
        try:
            self._tell_end()
            if not self._is_plain:
                settle()
        finally:  # from here on other threads may look at the gradients
            for optimizer in self.optimizers:
                optimizer.end_block = None

    def _tell_end(self) -> None:
        self.around.end_block()
        self.around.events.block_ends(self)

    def _unscale(self, agrees: bool) -> BackwardOutcome | None:
        """Unscales the gradients; the scale follows where the ranks can agree on an overflow."""
        was_delayed = any(optimizer.delayed is not None for optimizer in self.optimizers)
        looks = self.scaler.is_dynamic or not self.scale.is_identity
        found_inf = self.scaler.new_found_inf() if looks else None
        # Gradients of parameters that two of the optimizers share.
        done: set[int] | None = set() if len(self.optimizers) > 1 else None
        for optimizer in self.optimizers:
            optimizer.unscale(self.scale, found_inf, done)
        for optimizer in self.optimizers:
            optimizer.restore_grads()
        if not self.scaler.is_dynamic:
            return None
        outcome = self.scaler.finish(
            found_inf,
            None if was_delayed else _as_number(self.loss.detach()),
            update=agrees and not self.delay_overflow_check,
            capture=self._capture,
            groups=dict.fromkeys(
                group
                for one in (self.optimizers if agrees else ())
                for group in one.agreement.list_groups(one.params())
            ),
        )
        for optimizer in self.optimizers:
            optimizer.pending.append(outcome)
        return outcome


def _validate_open(optimizer: AmpOptimizer) -> None:
    if optimizer.is_closed:
        raise NotInitializedError(
            f"scale_loss: uninitialize() has given this {type(optimizer.optimizer).__name__} back since the "
            f"block was made: call amp.initialize(model, optimizer) again, then scale_loss"
        )


def _has_nothing_to_do(optimizer: AmpOptimizer) -> bool:
    """Whether a block at a static scale of 1 leaves the gradients of an optimizer where they come to be."""
    local = optimizer.local
    waits = optimizer.end_block or optimizer.delayed or local.read_scale or optimizer.capture is not None
    waits = waits or optimizer.unnamed.scale is not None
    return not (waits or optimizer.masters.pairs or local.coming or local.sharded)


def _as_number(loss: Tensor) -> Tensor | None:
    """Returns the loss, or its sum, to be kept beside the outcome; None for one that wraps others."""
    if type(loss) is not Tensor:
        return None
    return loss.sum() if loss.dim() else loss

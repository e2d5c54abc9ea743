"""One block of `scale_loss`: what happens before and after its backward passes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor

from ampatch.errors import AmpError, AmpTypeError, NotInitializedError
from ampatch.levels.private import graph_task
from ampatch.levels.ranks import has_ranks
from ampatch.steps.captured import CapturedBlock, CapturedGrads
from ampatch.steps.events import Surroundings
from ampatch.steps.optimizer import AmpOptimizer, Phase
from ampatch.steps.scaler import BackwardOutcome, LossScaler, Scale


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


@dataclass(eq=False, repr=False)  # Dynamo of torch 2.6 prints one that has no values yet
class ScaledLoss(NotYetScaled):
    """The context manager that `scale_loss` returns; yields the scaled loss.

    On the way out the gradients made inside are unscaled, checked and added to earlier ones, and
    the scale is updated; nothing of it waits for the device. A block that raises leaves the
    gradients as they were before it (see `AmpOptimizer.discard_grads` for the exception).

    What a backward in it makes for optimizers that it does not name is unscaled as well, and an overflow of
    theirs is looked for at their own steps: the loss of a generator leaves gradients at the discriminator.
    """

    loss: Tensor
    optimizers: Sequence[AmpOptimizer]
    scaler: LossScaler
    around: Surroundings
    delay_unscale: bool = False
    delay_overflow_check: bool = False
    scale: Scale | None = None
    scaled: Tensor | None = None
    is_over: bool = False
    went_backward: bool = False  # whether the scaled loss was part of any backward
    thread: int | None = None  # that is in the block, if its gradients are scaled
    _others: list[AmpOptimizer] = field(default_factory=list)  # whose gradients it scales, unnamed

    def __enter__(self) -> Tensor:
        try:
            return self._begin()
        except BaseException:  # then nobody calls __exit__
            for optimizer in [one for one in self.optimizers if one.block is self]:
                optimizer.block = None
                optimizer.restore_grads()
            if self.scaled is not None:  # somebody was told of it
                self._close()
            raise

    def _begin(self) -> Tensor:
        loss, scaler, around = self.loss, self.scaler, self.around
        self._capture = around.capture()  # what the replay of a CUDA graph must repeat
        self._is_plain = self._capture is None and scaler.is_identity
        if self._is_plain:
            for optimizer in self.optimizers:
                self._is_plain &= optimizer.is_plain()
        if self._is_plain:
            self.scale = scale = scaler.begin(loss.device)
            for optimizer in self.optimizers:
                optimizer.block = self
        else:
            self.scale = scale = self._prepare()
        if loss.dtype is not torch.float32:
            loss = loss.float()
        self.scaled = loss
        if not scale.is_identity:
            self.scaled = scale.scale(loss)
            around.begin_scaled_block(self)
        for callback in around.events.block_begins:
            callback(self)
        return self.scaled

    def _prepare(self) -> Scale:
        """Prepares the optimizers for backward passes; returns what these are scaled by."""
        held = None
        for optimizer in self.optimizers:
            if optimizer.is_closed:
                raise NotInitializedError(
                    f"scale_loss: uninitialize() was called after this block of "
                    f"{type(optimizer.optimizer).__name__} was created: call "
                    f"amp.initialize(model, optimizer) again, then scale_loss"
                )
            if held is None and optimizer.phase in (Phase.LOCAL, Phase.READ):
                held = optimizer.scale  # of what waits to be averaged: those of this block are added to it
        if held is not None and held.capture is self._capture:
            scale, self.scaler = held, held.scaler
        else:
            scale = self.scaler.begin(self.loss.device, self._capture)
        self._around = graph_task()  # a backward that the block itself is inside of
        for optimizer in self.optimizers:
            optimizer.begin_block(scale, self)
        return scale

    # Optimizers that the block does not name

    def adopt(self, others: Iterable[AmpOptimizer]) -> None:
        """Unscales their gradients at its end, too: a backward of the scaled loss is about to make some."""
        for optimizer in others:
            adds = optimizer.scale is self.scale and optimizer.phase is not Phase.READ
            if not adds and optimizer.block is None and optimizer not in self.optimizers:
                optimizer.begin_block(self.scale, self, is_named=False)
                self._others.append(optimizer)

    def release(self, optimizer: object = None) -> bool:
        """Unscales those gradients now: before a step of the optimizer, or a backward that is not scaled.

        Returns whether it is one that the block does not name.
        """
        others = self._others
        if not others or (optimizer is not None and optimizer not in others):
            return False
        self._validate_no_backward(
            "an optimizer that the block does not name steps inside of its backward, where gradients are "
            "still scaled: step after the block, and name the optimizer in scale_loss"
        )
        named = {id(param) for one in self.optimizers for param in one.masters.stepped_params()}
        if not named.isdisjoint(id(param) for one in others for param in one.masters.stepped_params()):
            self._end()  # they share gradients
            return True
        self._others, done = [], set()
        for one in others:
            one.unscale_unnamed(self.scale, done)
        for one in others:
            one.restore_grads()
            one.block = None
        return True

    # The end

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._end()
        elif not self.is_over:
            self._close(self._discard)

    def _discard(self) -> None:
        for optimizer in (*self.optimizers, *self._others):
            optimizer.discard_grads(self.scale)
        for optimizer in (*self.optimizers, *self._others):  # two of them may step one parameter
            optimizer.restore_grads()

    def end_early(self, *, by_step: bool = True) -> None:
        """Ends the block at a step inside it, or at `uninitialize`.

        Raises AmpError inside of its backward, unless the scale is a static 1: gradients that
        are still to come would be scaled, and who steps then could not see an overflow of theirs.
        """
        place = "inside of backward, where gradients are still scaled"
        self._validate_no_backward(
            f"an optimizer's step ran {place}: "
            f"step after the block, or use loss_scale=1.0 (the default of O4 and O5)"
            if by_step
            else f"uninitialize() was called {place}: call it after the block of scale_loss"
        )
        if by_step:
            self._end()
        else:
            self._close(functools.partial(self._settle, agrees=False))

    def _validate_no_backward(self, text: str) -> None:
        if not self.scale.is_identity and graph_task() != self._around:
            raise AmpError(f"scale_loss: {text}")

    def _end(self) -> None:
        """Unscales what the block made, once."""
        if self.is_over:
            return
        try:
            self._close(self._settle)
        except BaseException:  # Ctrl-C, say: some gradients may still be scaled
            self._close(self._discard)
            raise
        for callback in self.around.events.block_ended if self.scaled is not None else ():
            callback(self)

    def _close(self, settle: Callable[[], None] | None = None) -> None:
        self.is_over = True
        try:
            self.around.end_block()
            for callback in self.around.events.block_ends:
                callback(self)
            if not self.scale.is_identity:
                self.around.end_scaled_block(self)
            if settle is not None and not self._is_plain:
                settle()
        finally:  # from here on other threads may look at the gradients
            for optimizer in (*self.optimizers, *self._others):
                optimizer.block = None

    def _settle(self, *, agrees: bool = True) -> None:
        scale, scaler = self.scale, self.scaler
        outcome, was_delayed = None, False
        delays = self.delay_unscale and not scale.is_identity and not self._share_params()
        found_inf = scaler.new_found_inf() if scaler.is_dynamic or not scale.is_identity else None
        for optimizer in self.optimizers:
            local = optimizer.local
            delays = delays or ((local.coming or local.sharded) and local.are_coming())
            was_delayed |= optimizer.phase is not Phase.UNSCALED
        # Gradients of parameters that two of the optimizers share.
        done: set[int] | None = set() if len(self.optimizers) + len(self._others) > 1 else None
        for optimizer in self.optimizers:
            if delays:
                optimizer.delay(scale, done)
            else:
                optimizer.unscale(scale, found_inf, done)
        for optimizer in self._others:
            optimizer.unscale_unnamed(scale, done)
        for optimizer in (*self.optimizers, *self._others):
            if optimizer.earlier.pairs:
                optimizer.restore_grads()
        if scaler.is_dynamic and not delays:
            outcome = self._finish(found_inf, agrees, knows_loss=not was_delayed)
        if self._capture is not None:
            grads = list(map(CapturedGrads, self.optimizers))
            delayed, update = scale if delays else None, not self.delay_overflow_check
            self._capture.append(CapturedBlock(grads, outcome, scaler, delayed, update))

    def _share_params(self) -> bool:
        """Whether two of the optimizers step one parameter: one could step it scaled, or both unscale it."""
        ids = [id(param) for one in (*self.optimizers, *self._others) for param in one.params()]
        return len(set(ids)) < len(ids)

    def _finish(self, found_inf: Tensor, agrees: bool, knows_loss: bool) -> BackwardOutcome:
        """Has the scale follow, where the ranks can agree on an overflow."""
        groups: dict[torch.distributed.ProcessGroup, None] = {}
        if agrees and has_ranks():
            for optimizer in self.optimizers:
                groups |= dict.fromkeys(optimizer.list_groups())
        loss = self.loss.detach() if knows_loss and type(self.loss) is Tensor else None
        if loss is not None and loss.dim():
            loss = loss.sum()
        update = agrees and not self.delay_overflow_check
        outcome = self.scaler.finish(found_inf, loss, update=update, capture=self._capture, groups=groups)
        for optimizer in self.optimizers:
            optimizer.pending.append(outcome)
        return outcome


class LateLoss(ScaledLoss):
    """A block around a backward that begins at a scaled loss of which the block has ended; names nobody."""

    def __init__(self, scale: Scale, around: Surroundings, thread_optimizers: Iterable[AmpOptimizer]) -> None:
        super().__init__(torch.zeros(()), (), scale.scaler, around, scale=scale)
        self._thread_optimizers = thread_optimizers

    def __enter__(self) -> Tensor:
        self._capture, self._is_plain, self._around = None, False, graph_task()
        self.adopt(self._thread_optimizers)
        return self.loss

    def _finish(self, *_: object, **__: object) -> BackwardOutcome | None:
        """Leaves the scale to the steps of those that it does not name."""


@dataclass(slots=True, eq=False)
class PlainBackward:
    """A backward whose gradients are not scaled, and the blocks of its thread that are open."""

    is_whole: bool  # whether it begins at tensors, and no gradients are given, which may be scaled
    blocks: Sequence[ScaledLoss]
    before: list = field(default_factory=list)  # what who hears of it has seen before it

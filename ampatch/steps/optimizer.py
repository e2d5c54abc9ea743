"""What ampatch keeps for one optimizer: gradients to unscale, steps to skip, masters to follow."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from threading import get_ident

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.errors import AmpError
from ampatch.levels.stack import is_running, wrap_closure
from ampatch.levels.undo import refer
from ampatch.steps.call import Call
from ampatch.steps.captured import CapturedBlock, CapturedGrads, capture_step, enter_capture
from ampatch.steps.events import Surroundings
from ampatch.steps.grads.local import LocalGrads, scale_again
from ampatch.steps.grads.plain import EarlierGrads, find_grads
from ampatch.steps.grads.unnamed import UnnamedGrads
from ampatch.steps.masters.grads import MasterGrads, NoMasterGrads
from ampatch.steps.masters.params import MasterParams, NoMasters
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.ranks import Agreement
from ampatch.steps.scaler import Scale
from ampatch.steps.step import SkipStep


class AmpOptimizer:
    """Unscales gradients of one optimizer, skips steps on overflow and feeds masters, in hooks of `step`."""

    call: Call  # that took it, once it has

    def __init__(
        self, optimizer: Optimizer, masters: MasterParams, around: Surroundings, given: object = None
    ) -> None:
        self.optimizer = optimizer
        self.find_given = refer(given)  # a wrapper may be dropped before the optimizer
        self.undo = ExitStack()  # what was done to the optimizer; lives as long
        self.casts: Sequence[object] = ()  # those of its parameters, for undo, should the modules be gone
        self.masters = masters
        self._lock, has_none = masters.lock, isinstance(masters, NoMasters)
        self._grads = (NoMasterGrads if has_none else MasterGrads)(masters.pairs)
        self.around, self._events = around, around.events
        self.pending: list[BackwardOutcome] = []  # of the blocks since the last step
        self.last_outcomes: list[BackwardOutcome] = []  # of the blocks that led to the last step
        self.end_block: Callable[[], None] | None = None  # ends the block that is open
        self.delayed: Scale | None = None  # what the gradients are still scaled by
        self.unnamed = UnnamedGrads()
        self.local, self.agreement = LocalGrads(), Agreement()
        self._earlier, self._skip = EarlierGrads(), SkipStep()
        self._captured: list | None = None  # the capture of a CUDA graph that the step is in
        self.capture: object = None  # that which the last block was in, and
        self.from_before: set[int] = set()  # the ids of parameters that had gradients before that block
        self.thread: int | None = None  # that used it last

    def params(self) -> list[Tensor]:
        """The parameters that the optimizer steps: masters where there are any."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def own_params(self) -> list[Tensor]:
        """The parameters that are no masters, and so hold their gradients themselves."""
        return self.masters.select_others(self.params())

    # A block of scale_loss

    def prepare_backward(self, scale: Scale, end_block: Callable[[], None]) -> None:
        """Sets earlier gradients aside, so that the new ones are seen apart from them.

        `end_block` ends the block of `scale_loss` early, for a step inside it. Raises AmpError inside
        another block of this optimizer, unless the scale is a static 1: their gradients would mix.
        """
        if self.end_block is not None and not scale.is_identity:
            raise AmpError(
                f"scale_loss: {type(self.optimizer).__name__} is inside another block of scale_loss already, "
                f"and gradients of two scales would mix: end that block first, or add the losses"
            )
        with self._lock:
            self.end_block, self.thread = end_block, get_ident()
        if scale.capture is not None or self.capture is not None:
            enter_capture(self, scale.capture)
            self.capture = scale.capture
            self.from_before = {id(param) for param in self.model_params() if param.grad is not None}
        if self.local.read_scale is not None:
            before, self.local.read_scale = self.local.read_scale, None
            scale_again(self.own_params(), self.masters, before, scale)
            self.delayed, self.local.are_waiting = scale, True
        if self.delayed is scale:
            self._grads.drop_restarted()
            self._grads.begin_again()
            if not self.local.are_waiting:  # these accumulate where they are
                self._earlier.take(self.model_params())
            return
        self.settle()
        self._grads.follow()
        self._grads.begin()
        if not scale.is_identity:
            self._earlier.take(self.own_params())

    @torch.no_grad()
    def delay(self, scale: Scale) -> None:
        """Leaves the gradients scaled until a later block, or the step, settles them."""
        self.local.are_waiting |= self.local.are_coming()
        self.local.coming.clear()
        if self.delayed is not scale:
            # What was set aside is unscaled: a power of two takes it there and back exactly.
            self._earlier.change(functools.partial(scale.scale_clean, outcomes=self.pending))
        self.delayed = scale
        self.restore_grads()

    def held_scale(self) -> Scale | None:
        """The scale of gradients that wait to be averaged, which those of the next block are added to."""
        return self.local.read_scale or (self.delayed if self.local.are_waiting else None)

    def settle_for_reader(self, *, is_backward: bool = False) -> None:
        """Takes in those of plain backwards; unscales what waits for ranks, if no plain backward is next."""
        with self._lock as is_free:
            if is_free and self.local.are_waiting and not is_backward:
                self.local.read_scale, self.local.read_found_inf = self.delayed, self._unscale_delayed()
            elif is_free and self.end_block is None and self.delayed is None:
                self._settle_unnamed() if is_backward else self.unnamed.unscale(self._grads)
                self._grads.follow(looks=is_backward)

    def settle(self, *, is_step: bool = False) -> None:
        """Unscales what a block left scaled: with `delay_unscale`, or where it named others."""
        if is_step:
            self.unnamed.check_step()
        self._settle_unnamed(is_step=is_step)
        scale, found_inf = self.delayed, self._unscale_delayed()
        if scale is None and self._lock.step is not None:  # what somebody has read before
            scale, found_inf = self.local.read_scale, self.local.read_found_inf
            self.local.read_scale = None
        if scale is not None:
            outcome = self._finish(scale, found_inf)
            if scale.capture is not None:
                scale.capture.append(CapturedBlock([CapturedGrads(self)], outcome, scale.scaler))

    def _settle_unnamed(self, *, is_step: bool = False) -> None:
        if (scale := self.unnamed.scale) is not None and is_step:
            self._events.step_uses_unnamed(self)
        if scale and (found_inf := self.unnamed.settle(self._grads, is_step=is_step)) is not None:
            self._finish(scale, found_inf)

    def _finish(self, scale: Scale, found_inf: Tensor) -> BackwardOutcome | None:
        if not scale.scaler.is_dynamic:
            return None
        # As in apex, a delayed block does not count towards growth.
        groups = self.agreement.list_groups(self.params())
        outcome = scale.scaler.finish(found_inf, counts=False, capture=scale.capture, groups=groups)
        self.pending.append(outcome)
        return outcome

    def _unscale_delayed(self) -> Tensor | None:
        """Returns the found_inf of what a block left scaled; the scale knows nothing of it yet."""
        if self.delayed is None:
            return None
        found_inf = self.delayed.scaler.new_found_inf()
        self.unscale(self.delayed, found_inf, None)
        self.restore_grads()
        return found_inf

    def unscale(self, scale: Scale, found_inf: Tensor | None, done: set[int] | None) -> None:
        """Unscales the new gradients; no host sync. `end_backward` must follow.

        `found_inf` is needed unless the scale is a static 1; `done` are those that others unscaled, by id.
        """
        self.masters.install_again()
        if self.delayed is not None:
            self._earlier.give_back()  # scaled as well
            self.delayed, self.local.are_waiting = None, False
        if scale.is_identity:
            self._grads.feed(None)
            return
        grads = find_grads(self.own_params())
        if done is not None:
            grads = [grad for grad in grads if id(grad) not in done]
            done.update(map(id, grads))
        scale.unscale_(grads, found_inf)
        self._grads.feed(functools.partial(scale.unscale_, found_inf=found_inf))

    def discard_grads(self, scale: Scale) -> None:
        """Undoes a block that raised: drops its gradients. `restore_grads` must follow, for all optimizers.

        What accumulates in place, as in plain torch, stays as the exception left it: gradients of
        float32 weights with a static scale of 1, and those that are not averaged over ranks yet.
        """
        self.local.coming.clear()
        if self.delayed is None and scale.is_identity:
            params: Iterable[Tensor] = (pair.half for pair in self.masters)
        else:
            params = () if self.local.are_waiting else self.model_params()
        for param in params:
            param.grad = None

    def restore_grads(self) -> None:
        """Puts earlier gradients back after a block that unscaled nothing, or not all at once."""
        self.end_backward()
        self._grads.note_seen()

    def model_params(self) -> list[Tensor]:
        """The parameters that backward gives gradients to."""
        return [*self.own_params(), *(pair.half for pair in self.masters)]

    def end_backward(self) -> None:
        """Puts earlier gradients back, with the new ones added."""
        self._earlier.give_back()
        self._grads.end()

    # A step

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        """Prepares a step; the hook that runs before `optimizer.step`.

        A class that calls the `step` of its base class runs the hooks of both: the outer ones count.
        """
        if self._lock.step is not None and is_running(self._lock.step):
            return None
        self._lock.begin_step(sys._getframe(1))
        self.thread = get_ident()
        self._events.step_begins(self)
        self.last_outcomes = []
        self._skip.begin(optimizer)
        self._captured = self.around.capture()
        enter_capture(self, self._captured, is_step=True)
        changed = wrap_closure(args, kwargs, functools.partial(self._evaluate, optimizer))
        self._before_update(optimizer, evaluates=changed is not None)
        return changed

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """Runs a closure inside a step: on the current weights, its gradients unscaled."""
        self.masters.copy_to_model()
        result = closure()
        self._before_update(optimizer)
        return result

    def _before_update(self, optimizer: Optimizer, *, evaluates: bool = False) -> None:
        if self.end_block is not None:
            self.end_block()  # the step is inside a block: its gradients are needed now
        waits = self.local.are_waiting or self.unnamed.scale is not None
        if not (evaluates and waits):  # else a closure has them averaged, or clears them
            self.settle(is_step=True)
            if self._grads.follow(is_step=not evaluates):
                self._grads.told = self._events.step_ignores_edits(self)
        self.masters.take_edits()
        self.last_outcomes, outcomes, self.pending = self.last_outcomes + self.pending, self.pending, []
        if outcomes:
            self._skip.skip_after_overflow(optimizer, self.params(), self.last_outcomes)

    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Completes a step; the hook that runs after `optimizer.step`."""
        if self._lock.step is not sys._getframe(1):
            return
        self._skip.end(optimizer)
        self._grads.drop()  # first, because rounding may need memory
        self.masters.end_step(optimizer)
        self._lock.step = None
        if self._captured is None:
            self._events.step_ended(self)
        else:
            capture_step(self, self._captured)

    def repeat_step(self) -> None:
        """Notes that a step ran in a CUDA graph that was replayed."""
        self._events.step_begins(self)
        self.last_outcomes, self.pending = self.pending, []
        self._grads.drop()
        self._events.step_ended(self)

    def show_grads(self) -> None:
        """Puts the gradients back that a skipped step has hidden."""
        self._skip.end(self.optimizer)

    def was_skipped(self) -> bool:
        """Whether the last step was skipped; one host sync if the optimizer skips on the device."""
        return BackwardOutcome.read_all(self.last_outcomes)

    def zero_grad(self, original: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Clears the gradients of masters, and those of the model, which are not in the groups."""
        self.masters.install_again()
        original(*args, **kwargs)
        self._grads.clear(set_to_none=bool(kwargs.get("set_to_none", args[0] if args else True)))

    def close(self) -> None:
        """Leaves the gradients unscaled, and takes the model's weights as they are now.

        The scale is not asked: after an exception on one rank the others would wait for it.
        """
        self._unscale_delayed()
        self.unnamed.unscale(self._grads)
        self._grads.drop_restarted()
        self.masters.take_edits()

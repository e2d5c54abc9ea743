"""What ampatch keeps for one optimizer: gradients to unscale, steps to skip, masters to follow."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.errors import AmpError
from ampatch.levels.ranks import has_ranks
from ampatch.levels.stack import is_running, wrap_closure
from ampatch.levels.undo import refer
from ampatch.steps.call import Call
from ampatch.steps.captured import CapturedBlock, CapturedGrads, capture_step, enter_capture
from ampatch.steps.events import Surroundings
from ampatch.steps.grads.local import LocalGrads, scale_again
from ampatch.steps.grads.plain import EarlierGrads, find_grads
from ampatch.steps.grads.unnamed import UnnamedGrads
from ampatch.steps.masters.grads import MasterGrads, NoMasterGrads
from ampatch.steps.masters.params import MasterParams, NoMasters, do_nothing
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.ranks import Agreement
from ampatch.steps.scaler import Scale
from ampatch.steps.step import SkipStep, drop_after_overflow


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
        self.end_block: Callable[..., None] | None = None  # ends the block that is open
        self.is_closed = False
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

    def prepare_backward(self, scale: Scale, end_block: Callable[..., None]) -> None:
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
            self.from_before = {id(param) for param in self.stepped_params() if param.grad is not None}
        if self.local.read_scale is not None:
            self.local.read_scale = None
            scale_again(self.own_params(), self.masters, scale)
            self.delayed, self.local.are_waiting = scale, True
        if self.delayed is not scale:
            self.settle()
        if not self.local.are_waiting:  # these accumulate where they are
            self._grads.share()
            if not scale.is_identity or (self.masters.pairs and has_ranks()):
                self.set_aside()

    def set_aside(self) -> None:
        """Takes gradients away, to be added to those of the next backward passes.

        Those are scaled by another scale, or DistributedDataParallel makes them: it refuses to add half
        gradients to float32 ones.
        """
        self._earlier.take(self.stepped_params())
        self._grads.take_away()

    # A backward pass, of an optimizer with masters

    def begin_backward(self) -> None:
        """Has both sides of masters agree before gradients are added to theirs."""
        if not self.local.are_waiting:
            self._grads.share(keeps_graphs=True)
            if self.end_block is None and has_ranks() and not self._earlier:
                self.set_aside()

    def end_backward(self) -> None:
        """Gives masters the gradients that a backward has made, but for those that ranks will average."""
        if self.local.are_waiting or self.local.are_coming():
            return
        if self.end_block is None:
            self.restore_grads()
        else:
            self._grads.share(keeps_graphs=True)

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
            elif is_free and not self.local.are_waiting:
                self._grads.share()
                if self.end_block is None and self.delayed is None:
                    self._settle_unnamed() if is_backward else self.unnamed.unscale()

    def settle(self, *, is_step: bool = False) -> None:
        """Unscales what a block left scaled: with `delay_unscale`, or where it named others."""
        if is_step:
            self.unnamed.check_step()
        self._settle_unnamed(is_step=is_step)
        scale, found_inf = self.delayed, self._unscale_delayed()
        if scale is None and (self._lock.step or self.is_closed):  # what somebody has read before
            scale, found_inf = self.local.read_scale, self.local.read_found_inf
            self.local.read_scale = None
        if scale is not None:
            outcome = self._finish(scale, found_inf)
            if scale.capture is not None:
                scale.capture.append(CapturedBlock([CapturedGrads(self)], outcome, scale.scaler))

    def _settle_unnamed(self, *, is_step: bool = False) -> None:
        if (scale := self.unnamed.scale) is not None and is_step:
            self._events.step_uses_unnamed(self)
        if scale and (found_inf := self.unnamed.settle(is_step=is_step)) is not None:
            self._finish(scale, found_inf)

    def _finish(self, scale: Scale, found_inf: Tensor) -> BackwardOutcome | None:
        if not scale.scaler.is_dynamic:
            return None
        # As in apex, a delayed block does not count towards growth.
        agrees, capture = not self.is_closed, scale.capture
        groups = self.agreement.list_groups(self.params()) if agrees else ()
        outcome = scale.scaler.finish(found_inf, update=agrees, counts=False, capture=capture, groups=groups)
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
        self._grads.share()
        if self.delayed is not None:
            self.delayed, self.local.are_waiting = None, False
            self.restore_grads()  # scaled as well
        if scale.is_identity:
            return
        grads = find_grads(self.stepped_params())
        if done is not None:
            grads = [grad for grad in grads if id(grad) not in done]
            done.update(map(id, grads))
        scale.unscale_(grads, found_inf)

    def discard_grads(self, scale: Scale) -> None:
        """Undoes a block that raised: drops its gradients. `restore_grads` must follow, for all optimizers.

        What accumulates in place, as in plain torch, stays as the exception left it: gradients with a static
        scale of 1, and those that are not averaged over ranks yet.
        """
        self.local.coming.clear()
        if self.local.are_waiting or (self.delayed is None and scale.is_identity):
            return
        for param in self.stepped_params():
            param.grad = None
        self._grads.take_away()

    def restore_grads(self) -> None:
        """Puts earlier gradients back, with the new ones added."""
        if self._earlier:
            if not self.local.are_waiting:
                self._grads.share()
            self._earlier.give_back()
        if not self.local.are_waiting:
            self._grads.share()

    def model_params(self) -> list[Tensor]:
        """The parameters that backward gives gradients to."""
        return [*self.own_params(), *(pair.half for pair in self.masters)]

    def stepped_params(self) -> list[Tensor]:
        """The parameters that hold the gradients in float32: masters, and those that need none."""
        return [*self.own_params(), *(pair.master for pair in self.masters)]

    # A step

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        """Prepares a step; the hook that runs before `optimizer.step`. `masters.take_writes` must follow.

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
        self.masters.install_again()
        changed = wrap_closure(args, kwargs, functools.partial(self._evaluate, optimizer))
        self._before_update(optimizer, evaluates=changed is not None)
        return changed

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """Runs a closure inside a step: on the current weights, its gradients unscaled."""
        self.masters.copy_to_model()
        result = closure()
        self.masters.take_edits()
        self._before_update(optimizer)
        return result

    def _before_update(self, optimizer: Optimizer, *, evaluates: bool = False) -> None:
        if self.end_block is not None:
            self.end_block()  # the step is inside a block: its gradients are needed now
        waits = self.local.are_waiting or self.unnamed.scale is not None
        if not (evaluates and waits):  # else a closure has them averaged, or clears them
            self.settle(is_step=True)
            self._grads.share()
        self.last_outcomes, outcomes, self.pending = self.last_outcomes + self.pending, self.pending, []
        if outcomes:
            self._skip.skip_after_overflow(optimizer, self.params(), self.last_outcomes)

    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Completes a step; the hook that runs after `optimizer.step`."""
        if self._lock.step is not sys._getframe(1):
            return
        self._skip.end(optimizer)
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
        sets_to_none = kwargs.get("set_to_none", args[0] if args else True)
        if sets_to_none:
            self._grads.clear()
        else:
            self._grads.share()
        original(*args, **kwargs)

    def close(self) -> None:
        """Leaves the gradients unscaled, asking no other rank, and takes the model's weights as they are."""
        self.is_closed, self.end_block = True, do_nothing  # a block that was made before finds it so
        self.settle()
        self._grads.share()
        drop_after_overflow(self.optimizer, [*self.params(), *self.model_params()], self.pending)
        self.masters.take_edits()

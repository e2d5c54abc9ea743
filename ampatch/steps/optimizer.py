"""What ampatch keeps for one optimizer: gradients to unscale, steps to skip, masters to follow."""

from __future__ import annotations

import enum
import functools
import sys
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from threading import get_ident
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.errors import AmpError
from ampatch.levels.policy import Policy
from ampatch.levels.ranks import has_ranks
from ampatch.levels.stack import is_running, logger, wrap_closure
from ampatch.levels.undo import refer
from ampatch.steps.captured import CapturedBlock, CapturedGrads, capture_step, enter_capture
from ampatch.steps.events import Surroundings
from ampatch.steps.gradients import EarlierGrads, LocalGrads, MasterGrads, find_grads, scale_again
from ampatch.steps.masters import MasterParams
from ampatch.steps.scaler import Agreement, BackwardOutcome, LossScaler, Scale


class Phase(enum.Enum):
    """By what the gradients of an optimizer are multiplied, and who takes that off again.

    | phase    | a block begins    | ends     | delays  | names others | plain backward | is read | a step   |
    |----------|-------------------|----------|---------|--------------|----------------|---------|----------|
    | UNSCALED | sets aside        | UNSCALED | DELAYED | UNSCALED     | adds           | true    | uses     |
    | DELAYED  | UNSCALED, or adds | UNSCALED | DELAYED | DELAYED      | UNSCALED, adds | scaled  | UNSCALED |
    | LOCAL    | LOCAL             | UNSCALED | LOCAL   | LOCAL        | READ, adds     | READ    | UNSCALED |
    | READ     | LOCAL             |          |         | LOCAL        | adds, UNSCALED | true    | UNSCALED |

    A phase in a cell is the one that follows; what was scaled is unscaled on the way to UNSCALED. A block
    at the scale that is held adds to what is there. Another one settles what is DELAYED, or, where it does
    not name the optimizer, brings its own to the scale that is held; LOCAL ones it brings to its scale. A
    plain backward whose gradients ranks average settles what is READ.
    """

    UNSCALED = enum.auto()
    """True gradients, or none."""
    DELAYED = enum.auto()
    """Scaled until a later block, or the step, unscales them (`delay_unscale`)."""
    LOCAL = enum.auto()
    """Scaled, and not averaged over ranks yet: the backward that averages them adds to them in place."""
    READ = enum.auto()
    """LOCAL ones, unscaled for who reads them: the next block scales them again, and goes on."""


class OpenBlock(Protocol):
    """What an optimizer knows of a block of `scale_loss` that is open, beside its own phase."""

    def end_early(self, *, by_step: bool = True) -> None:
        """Ends it at a step inside it, or at `uninitialize`."""

    def release(self, optimizer: object = None) -> bool:
        """Lets optimizers go that it does not name; returns whether this was one of them."""


@dataclass(slots=True, eq=False)
class InitializeCall:
    """What is left of one call of `initialize`; each optimizer belongs to the call that took it.

    The scalers stay, whatever becomes of models and optimizers: `state_dict` numbers them on.
    """

    policy: Policy
    verbosity: int
    scalers: Sequence[LossScaler]
    undo: ExitStack = field(default_factory=ExitStack)  # what was done to the models and the optimizers
    members: list[weakref.ref] = field(default_factory=list)  # these, to see whether any is left

    def forget_dropped(self) -> None:
        """Forgets the undo once there is nothing left that it would undo."""
        if all(reference() is None for reference in self.members):
            self.undo.pop_all()
            self.members.clear()

    def close(self) -> None:
        """Undoes it on what is alive, which stays so until the end: some of it lives on our own hooks."""
        with self.undo:  # even if Ctrl-C ends what follows
            alive = [reference() for reference in self.members]
        alive.clear()


class SkipStep:
    """Skips steps of one optimizer.

    One that takes `found_inf` (a fused one) skips on the device without a host sync; for others the
    step costs one, and is skipped by hiding the gradients from it. So is the first step of a parameter
    in a fused optimizer, which would make its state from nothing (SGD's from uninitialized memory).
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._put: tuple[Tensor, Tensor | None] | None = None  # our found_inf, and that of a GradScaler
        self._stepped: set[int] = set()  # params that a fused optimizer keeps no state for

    def begin(self, optimizer: Optimizer) -> None:
        """Forgets what a step that raised may have left."""
        if self._hidden:
            self._hidden = []
        if self._put is not None:
            self._remove_found_inf(optimizer)

    def skip_after_overflow(self, optimizer: Optimizer, outcomes: list[BackwardOutcome]) -> None:
        """Has the step that begins change nothing if any outcome is an overflow."""
        new: list[Tensor] = []  # which the optimizer is about to step for the first time
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            stepped, state = self._stepped, optimizer.state
            new = [
                param
                for param in list_params(optimizer)
                if id(param) not in stepped and param not in state and param.grad is not None
            ]
            if not new:
                return self._put_found_inf(optimizer, BackwardOutcome.combine(outcomes))
        if BackwardOutcome.read_all(outcomes):
            for param in list_params(optimizer):
                if param.grad is not None:
                    self._hidden.append((param, param.grad))
                    param.grad = None
        else:
            self._stepped.update(map(id, new))

    def end(self, optimizer: Optimizer) -> None:
        """Puts hidden gradients back."""
        if self._put is not None:
            self._remove_found_inf(optimizer)
        if self._hidden:
            for param, grad in self._hidden:
                param.grad = grad
            self._hidden = []

    def _put_found_inf(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        theirs = vars(optimizer).get("found_inf")
        both = found_inf if theirs is None else torch.maximum(found_inf, theirs.to(found_inf.device))
        self._put = both, theirs
        optimizer.found_inf = both  # type: ignore[attr-defined]

    def _remove_found_inf(self, optimizer: Optimizer) -> None:
        put, self._put = self._put, None
        if put is not None and vars(optimizer).get("found_inf") is put[0]:
            del optimizer.found_inf  # type: ignore[attr-defined]
            if put[1] is not None:
                optimizer.found_inf = put[1]  # type: ignore[attr-defined]


class AmpOptimizer:
    """Unscales gradients of one optimizer, skips steps on overflow and feeds masters, in hooks of `step`.

    Its state is a `phase`, and the `block` that is open, if any. The methods are what happens to it, in the
    order of an iteration.
    """

    call: InitializeCall  # that took it, once it has

    def __init__(
        self, optimizer: Optimizer, masters: MasterParams, around: Surroundings, outer: object = None
    ) -> None:
        self.optimizer = optimizer
        self.find_outer = refer(outer)  # as it was given: a wrapper may be dropped before the optimizer
        self.undo = ExitStack()  # what was done to the optimizer; lives as long
        self.casts: Sequence[object] = ()  # those of its parameters, for undo, should the modules be gone
        self.masters = masters
        self._lock = masters.lock
        self.grads = MasterGrads(masters.pairs, around.changes)
        self.around, self._events = around, around.events
        self.phase = Phase.UNSCALED
        self.scale: Scale | None = None  # by which gradients are multiplied that are DELAYED, LOCAL or READ
        self._found_inf: Tensor | None = None  # of those that are READ
        self.block: OpenBlock | None = None  # that is open
        self.is_closed = False
        self.pending: list[BackwardOutcome] = []  # of the blocks since the last step
        self.last_outcomes: list[BackwardOutcome] = []  # of the blocks that led to the last step
        self._doubt: Scale | None = None  # of a block that did not name the optimizer, and left it gradients
        self.local, self.agreement = LocalGrads(), Agreement()
        self.earlier, self._skip = EarlierGrads(), SkipStep()
        self._captured: list | None = None  # the capture of a CUDA graph that the step is in
        self.capture: object = None  # that which the last block was in, and
        self.from_before: set[int] = set()  # the ids of parameters that had gradients before that block
        self.thread: int | None = None  # that used it last

    # Parameters

    def params(self) -> list[Tensor]:
        """The parameters that the optimizer steps: masters where there are any."""
        return list_params(self.optimizer)

    # A block of scale_loss

    def is_plain(self) -> bool:
        """Whether a block at a static scale of 1 leaves the gradients where they come to be."""
        local, is_busy = self.local, self.block is not None or self.capture is not None or self.is_closed
        if is_busy or self.masters.pairs or local.coming or local.sharded:
            return False
        return self.phase is Phase.UNSCALED

    def begin_block(self, scale: Scale, block: OpenBlock, *, is_named: bool = True) -> None:
        """Sets earlier gradients aside, so that the new ones are seen apart from them.

        What waits at another scale is settled, where the block names the optimizer or ranks will average.

        Raises AmpError inside another block of this optimizer, unless the scale is a static 1: their
        gradients would mix.
        """
        is_inside = self.block is not None and not self.block.release(self)
        if is_inside and not scale.is_identity:
            raise AmpError(
                f"scale_loss: {type(self.optimizer).__name__} is inside another block of scale_loss already, "
                f"and gradients of two scales would mix: end that block first, or add the losses"
            )
        with self._lock.mutex:
            self.block, self.thread = block, get_ident()
        if scale.capture is not None or self.capture is not None:
            enter_capture(self, scale.capture)
            self.capture = scale.capture
            self.from_before = {
                id(param) for param in self.masters.stepped_params() if param.grad is not None
            }
        if self.phase is Phase.LOCAL and self.scale is not scale:
            self._read_local()  # ranks have not averaged them yet: they are scaled again
        if self.phase is Phase.READ:
            scale_again(self.masters.own_params(), self.masters, scale)
            self.phase, self.scale = Phase.LOCAL, scale
        waits_apart = self.phase is Phase.DELAYED and self.scale is not scale
        if waits_apart and (is_named or self.local.are_coming()):
            self.settle()
        has_masters = bool(self.masters.pairs)
        if self.phase is not Phase.LOCAL and (not scale.is_identity or (has_masters and has_ranks())):
            if has_masters:
                self.grads.share()
            self.set_aside()

    def set_aside(self) -> None:
        """Takes gradients away, to be added to those of the next backward passes.

        Those are scaled by another scale, or DistributedDataParallel makes them: it refuses to add half
        gradients to float32 ones.
        """
        self.earlier.set_aside(self.masters.stepped_params())
        if self._doubt is not None and not (self.earlier.pairs or has_ranks()):
            self._doubt = None  # they were cleared; of ranks each has to look, or none

    # A backward pass

    def begin_plain_backward(self) -> None:
        """Unscales what waits: what is about to be added to it is not scaled."""
        if self.phase is Phase.DELAYED:
            self.settle()
        elif self.phase is Phase.LOCAL:
            self._read_local()

    def begin_backward(self) -> None:
        """Has both sides of masters agree before gradients are added to theirs."""
        if self.phase is Phase.READ:  # a plain one, which may average them
            scale_again((), self.masters, Scale(self.scale.scaler, 1.0))
        elif self.phase is not Phase.LOCAL:
            self.grads.share_changed(keeps_graphs=True)
            if self.block is None and has_ranks() and not self.earlier.pairs:
                self.set_aside()

    def end_backward(self) -> None:
        """Gives masters the gradients that a backward has made, but for those that ranks will average."""
        local = self.local
        are_coming = (local.coming or local.sharded) and local.are_coming()
        if self.phase is Phase.READ:
            self.grads.share()
            if not are_coming:
                self.settle()
        elif not (are_coming or self.phase is Phase.LOCAL):
            self.grads.share(keeps_graphs=self.block is not None, adds=True)
            if self.block is None:
                self.restore_grads()

    # The end of a block: one of these four, then `restore_grads`

    @torch.no_grad()
    def delay(self, scale: Scale, done: set[int] | None = None) -> None:
        """Leaves the gradients scaled until a later block, or the step; `done` receives their ids."""
        is_local = self.phase is Phase.LOCAL or self.local.are_coming()
        self.local.coming.clear()
        if not is_local:
            self.grads.share()
        if self.scale is not scale:
            # What was set aside is unscaled: a power of two takes it there and back exactly.
            self.earlier.change(functools.partial(scale.scale_clean, outcomes=self.pending))
        self.phase, self.scale = Phase.LOCAL if is_local else Phase.DELAYED, scale
        if done is not None:
            done.update(id(param.grad) for param in self.masters.stepped_params() if param.grad is not None)

    def unscale(self, scale: Scale, found_inf: Tensor | None, done: set[int] | None) -> bool:
        """Unscales the new gradients, and returns whether there are any; no host sync.

        `found_inf` is needed unless the scale is a static 1; `done` are those that others unscaled, by id.
        """
        if self.masters.pairs:
            self.masters.install_again()
            self.grads.share_changed(adds=self.phase is Phase.LOCAL)
        if self.phase is not Phase.UNSCALED:
            self.phase, self.scale = Phase.UNSCALED, None
            self.restore_grads()  # scaled as well
        if scale.is_identity:
            return False
        grads = find_grads(self.masters.stepped_params())
        if done is not None:
            grads = [grad for grad in grads if id(grad) not in done]
            done.update(map(id, grads))
        scale.unscale_(grads, found_inf)
        return bool(grads)

    def unscale_unnamed(self, scale: Scale, done: set[int] | None) -> None:
        """Unscales what a block has made that does not name the optimizer.

        Most often nobody steps them: so the step looks for an overflow, in those that are there by then.
        What waits, waits on: the block may not have reached it.
        """
        held = self.scale
        if self.phase is Phase.LOCAL or self.local.are_coming():
            self.delay(scale)
        elif held is not None:
            self.hold(None)
            self.unscale(scale, scale.scaler.new_found_inf(), done)
            for param in self.masters.stepped_params():
                param.grad = None if param.grad is None else held.scale(param.grad)
            self.hold(held)
        elif self.unscale(scale, scale.scaler.new_found_inf(), done) or has_ranks():
            self._doubt = scale

    def discard_grads(self, scale: Scale) -> None:
        """Undoes a block that raised: drops its gradients.

        What accumulates in place, as in plain torch, stays as the exception left it: gradients with a static
        scale of 1, and those that are not averaged over ranks yet.
        """
        self.local.coming.clear()
        if self.phase is Phase.LOCAL or scale.is_identity:
            return
        for param in self.masters.stepped_params():
            param.grad = None

    def restore_grads(self) -> None:
        """Puts earlier gradients back, with the new ones added."""
        if not self.earlier.pairs:
            return
        if self.masters.pairs and self.phase is not Phase.LOCAL:
            self.grads.share()
        self.earlier.give_back(beside=self.phase is Phase.LOCAL)

    # Between blocks and steps

    def read_grads(self) -> None:
        """Has both sides of masters agree, for who reads them; unscales what waits for ranks."""
        with self._lock as is_free:
            if is_free and self.phase is not Phase.LOCAL:
                self.grads.share()
            elif is_free and self.block is None:  # or the end of the block unscales them, as any
                self._read_local()

    def _read_local(self) -> None:
        scale, self._found_inf = self.scale, self._unscale_held()
        self.phase, self.scale = Phase.READ, scale

    def hold(self, scale: Scale | None) -> None:
        """Notes what the gradients are multiplied by until a later block, or the step, settles them."""
        self.phase, self.scale = Phase.UNSCALED if scale is None else Phase.DELAYED, scale

    def settle(self) -> None:
        """Unscales what a block left scaled, with `delay_unscale` or on its rank."""
        phase, scale = self.phase, self.scale
        if phase is Phase.UNSCALED:
            return
        found_inf = self._found_inf if phase is Phase.READ else self._unscale_held()
        self.phase, self.scale, self._found_inf = Phase.UNSCALED, None, None
        outcome = self._finish(scale, found_inf)
        if scale.capture is not None:
            scale.capture.append(CapturedBlock([CapturedGrads(self)], outcome, scale.scaler))

    def _unscale_held(self) -> Tensor:
        """Unscales what a block left scaled and returns its found_inf; the scale knows nothing of it yet."""
        scale = self.scale
        found_inf = scale.scaler.new_found_inf()
        self.unscale(scale, found_inf, None)
        self.restore_grads()
        return found_inf

    def _look_again(self) -> None:
        """Looks for an overflow in gradients to which a block has added that does not name the optimizer."""
        scale, self._doubt = self._doubt, None
        if scale.scaler.is_dynamic:
            found_inf = scale.scaler.new_found_inf()
            Scale(scale.scaler, 1.0).unscale_(find_grads(self.params()), found_inf)
            if self.pending:  # an overflow that is known does not count again
                found_inf.mul_(1 - BackwardOutcome.combine(self.pending).to(found_inf.device))
            self._finish(scale, found_inf)

    def _finish(self, scale: Scale, found_inf: Tensor) -> BackwardOutcome | None:
        if not scale.scaler.is_dynamic:
            return None
        # As in apex, a delayed block does not count towards growth.
        agrees, capture = not self.is_closed, scale.capture
        groups = self.list_groups() if agrees else ()
        outcome = scale.scaler.finish(found_inf, update=agrees, counts=False, capture=capture, groups=groups)
        self.pending.append(outcome)
        return outcome

    def list_groups(self) -> Collection[torch.distributed.ProcessGroup]:
        return self.agreement.list_groups(self.params())

    def zero_grad(self, original: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Clears the gradients of masters, and those of the model, which are not in the groups."""
        self.masters.install_again()
        sets_to_none = kwargs.get("set_to_none", args[0] if args else True)
        if sets_to_none:
            self.grads.clear()
        else:
            self.grads.share()
        original(*args, **kwargs)

    # A step

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        """Prepares a step; the hook that runs before `optimizer.step`. `masters.adopt_writes` must follow.

        A class that calls the `step` of its base class runs the hooks of both: the outer ones count.
        """
        lock = self._lock
        if lock.step is not None and is_running(lock.step):
            return None
        with lock.mutex:
            lock.step = sys._getframe(1)
        self.thread = get_ident()
        for callback in self._events.step_begins:
            callback(self)
        self.last_outcomes = []
        self._skip.begin(optimizer)
        self._captured = captured = self.around.capture()
        if captured is not None or self.capture is not None:
            enter_capture(self, captured, is_step=True)
        if self.masters.pairs:
            self.masters.install_again()
        changed = None
        if len(args) > 1 or kwargs:
            changed = wrap_closure(args, kwargs, functools.partial(self._evaluate, optimizer))
        self._before_update(optimizer, evaluates=changed is not None)
        return changed

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """Runs a closure inside a step: on the current weights, its gradients unscaled."""
        self.masters.copy_to_model()
        self._skip.end(optimizer)  # what an overflow before has hidden is the closure's to clear
        self.pending, self.last_outcomes = self.last_outcomes, []
        result = closure()
        self.masters.adopt_edits()
        self._before_update(optimizer)
        return result

    def _before_update(self, optimizer: Optimizer, *, evaluates: bool = False) -> None:
        block = self.block
        if block is not None and not block.release(self):
            block.end_early()  # the step is inside a block: its gradients are needed now
        if not (evaluates and self.phase is Phase.LOCAL):  # else a closure has them averaged
            if self.phase is not Phase.UNSCALED:
                self.settle()
            if self.masters.pairs:
                self.grads.share()
        if self._doubt is not None and not evaluates:  # else a closure clears them
            self._look_again()
        if self.pending:
            self.last_outcomes += self.pending
            self.pending = []
            self._skip.skip_after_overflow(optimizer, self.last_outcomes)

    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Completes a step; the hook that runs after `optimizer.step`."""
        if self._lock.step is not sys._getframe(1):
            return
        self._skip.end(optimizer)
        if self.masters.pairs:
            self.masters.end_step(optimizer)
        self._lock.step = None
        if self._captured is None:
            for callback in self._events.step_ended:
                callback(self)
        else:
            capture_step(self, self._captured)

    def repeat_step(self) -> None:
        """Notes that a step ran in a CUDA graph that was replayed."""
        for callback in self._events.step_begins:
            callback(self)
        self.last_outcomes, self.pending = self.pending, []
        for callback in self._events.step_ended:
            callback(self)

    def show_grads(self) -> None:
        """Puts the gradients back that a skipped step has hidden."""
        self._skip.end(self.optimizer)

    def was_skipped(self) -> bool:
        """Whether the last step was skipped; one host sync if the optimizer skips on the device."""
        return BackwardOutcome.read_all(self.last_outcomes)

    def close(self) -> None:
        """Leaves the gradients unscaled, asking no other rank, and takes the model's weights as they are."""
        self.is_closed, self.block = True, None
        self.settle()
        self.grads.share()
        drop_after_overflow(self.optimizer, [*self.params(), *self.masters.model_params()], self.pending)
        self.masters.adopt_edits()


def drop_after_overflow(
    optimizer: Optimizer, params: Sequence[Tensor], outcomes: Sequence[BackwardOutcome]
) -> None:
    """Drops the gradients of a step that would be skipped, where nobody is left to skip it."""
    if BackwardOutcome.read_all(outcome for outcome in outcomes if outcome.capture is None):
        for param in params:
            param.grad = None
        logger.warning(
            "uninitialize: gradients of %s had overflowed, and were dropped: the step that they were made "
            "for would have been skipped",
            type(optimizer).__name__,
        )


def list_params(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]

"""What ampatch keeps for one optimizer: gradients to unscale, steps to skip, masters to follow."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.closure import find_closure
from ampatch.errors import AmpError
from ampatch.grads import EarlierGrads, add_grads, cast_grads, find_grads
from ampatch.local_grads import LocalGrads
from ampatch.masters import MasterParam, MasterParams
from ampatch.scaler import Outcome, Scale
from ampatch.step_listener import StepListener
from ampatch.thread import is_running

logger = logging.getLogger("ampatch")


class AmpOptimizer:
    """Unscales the gradients of one optimizer, skips its steps on overflow and feeds its masters.

    Everything happens in hooks of `optimizer.step`, which survive LR schedulers. An optimizer that
    takes `found_inf` (a fused one) skips on the device without a host sync; for others the step
    costs one, and is skipped by hiding the gradients from it. So is the first step of a parameter in
    a fused optimizer, which would make its state from nothing (SGD's from uninitialized memory).
    """

    def __init__(self, optimizer: Optimizer, masters: MasterParams, listener: StepListener) -> None:
        self.optimizer = optimizer
        self.masters = masters
        self._listener = listener
        self._pending: list[Outcome] = []  # of the blocks since the last step
        self.last_outcomes: list[Outcome] = []  # of the blocks that led to the last step
        self.end_block: Callable[[], None] | None = None  # ends the block that is open
        self.delayed: Scale | None = None  # what the gradients are still scaled by
        self.local = LocalGrads()
        self._earlier = EarlierGrads()
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._stepped: set[int] = set()  # params that a fused optimizer keeps no state for
        self._step: FrameType | None = None  # the call that runs a step
        self._warned = False

    def params(self) -> Iterator[Tensor]:
        """The parameters that the optimizer steps: masters where there are any."""
        return (param for group in self.optimizer.param_groups for param in group["params"])

    def _own_params(self) -> Iterator[Tensor]:
        """The parameters that are no masters, and so hold their gradients themselves."""
        return (param for param in self.params() if not self.masters.owns(param))

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
        self.end_block = end_block
        if self.local.read_scale is not None:
            self._scale_again(self.local.read_scale, scale)
        if self.delayed is scale:
            self.masters.drop_restarted()
            for pair in self.masters:
                pair.continue_backward()
            if not self.local.are_waiting:  # these accumulate where they are
                self._earlier.take(self._model_params())
            return
        self.settle()
        self.adopt_grads()
        self.masters.drop_restarted()
        self.masters.begin_backward()
        if not scale.is_identity:
            self._earlier.take(self._own_params())

    @torch.no_grad()
    def delay(self, scale: Scale) -> None:
        """Leaves the gradients scaled until a later block, or the step, settles them."""
        self.local.wait()
        if self.delayed is not scale:
            # What was set aside is unscaled: a power of two takes it there and back exactly.
            self._earlier.change(scale.scale)
        self.delayed = scale
        self.end_backward()

    def steps_part_of(self, model: Module) -> bool:
        """Whether the optimizer steps any parameter of a model."""
        known = {id(param) for param in model.parameters()}
        return any(id(param) in known for param in self._model_params())

    def settle_for_reader(self) -> None:
        """Unscales gradients that wait to be averaged over ranks: somebody is about to use them."""
        if self.local.are_waiting:
            self.local.read_scale = self.delayed
            self.settle()

    @torch.no_grad()
    def _scale_again(self, before: Scale, scale: Scale) -> None:
        """Goes on as if nobody had read the gradients that wait: they are yet to be averaged."""
        for param in self._own_params():
            param.grad = None if param.grad is None else scale.scale(param.grad)
        for pair in self.masters:
            pair.half.grad = None if pair.half.grad is None else scale.rescale(pair.half.grad, before)
            pair.clear_master_grad()
        self.delayed, self.local.are_waiting, self.local.read_scale = scale, True, None

    def settle(self) -> None:
        """Unscales what a block with `delay_unscale` left scaled."""
        scale = self.delayed
        if scale is None:
            return
        found_inf = scale.scaler.new_found_inf()
        self.unscale(scale, found_inf, set())
        self.end_backward()
        if scale.scaler.is_dynamic:
            self.note(scale.scaler.finish(found_inf, update=True))

    def unscale(self, scale: Scale, found_inf: Tensor, done: set[int]) -> None:
        """Unscales the new gradients; no host sync. `end_backward` must follow.

        `done` holds the ids of gradients that another optimizer of the block has unscaled.
        """
        if self.delayed is not None:
            self._earlier.give_back()  # scaled as well
            self.delayed, self.local.are_waiting = None, False
        fresh = [pair for pair in self.masters if pair.has_fresh_grad()]
        grads = cast_grads(pair.half for pair in fresh)
        if not scale.is_identity:
            own = find_grads(self._own_params())
            scale.unscale_(grads + [grad for grad in own if id(grad) not in done], found_inf)
            done.update(map(id, own))
        _feed(fresh, grads)

    def adopt_grads(self) -> None:
        """Takes over gradients of a `backward` outside any block of `scale_loss`: unscaled ones."""
        fresh = [pair for pair in self.masters if pair.has_fresh_grad()]
        _feed(fresh, cast_grads(pair.half for pair in fresh))

    def discard_grads(self, scale: Scale) -> None:
        """Undoes a block that raised: drops its gradients, and restores the earlier ones.

        What accumulates in place, as in plain torch, stays as the exception left it: gradients of
        float32 weights with a static scale of 1, and those that are yet to be averaged over ranks.
        """
        self.local.drop_coming()
        if self.delayed is None and scale.is_identity:
            params: Iterable[Tensor] = (pair.half for pair in self.masters)
        else:
            params = () if self.local.are_waiting else self._model_params()
        for param in params:
            param.grad = None
        self.end_backward()

    def _model_params(self) -> list[Tensor]:
        """The parameters that backward gives gradients to."""
        return [*self._own_params(), *(pair.half for pair in self.masters)]

    def end_backward(self) -> None:
        """Puts earlier gradients back, with the new ones added."""
        self._earlier.give_back()
        for pair in self.masters:
            pair.end_backward()

    def note(self, outcome: Outcome) -> None:
        """Remembers what a block did, for the next step to skip or not."""
        self._pending.append(outcome)

    # A step

    def before_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple | None:
        """Prepares a step; the hook that runs before `optimizer.step`.

        A class that calls the `step` of its base class runs the hooks of both: the outer ones count.
        """
        if self._step is not None and is_running(self._step):
            return None
        self._step = sys._getframe(1)
        self._hidden, self.last_outcomes = [], []
        vars(optimizer).pop("found_inf", None)  # left by a step that raised
        self._before_update(optimizer)
        self._listener.enter_step(self._step)
        closure, rebuild = find_closure(args, kwargs)
        return None if closure is None else rebuild(functools.partial(self._evaluate, optimizer, closure))

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """Runs a closure inside a step: with casts, on the current weights, its gradients unscaled."""
        frame = self._listener.pause_step()
        self.masters.copy_to_model()
        result = closure()
        self._before_update(optimizer)
        self._listener.enter_step(frame)
        return result

    def _before_update(self, optimizer: Optimizer) -> None:
        if self.end_block is not None:
            self.end_block()  # the step is inside a block: its gradients are needed now
        self.settle()
        self.local.read_scale = None
        self.adopt_grads()
        self._check_model_grads()
        self.masters.take_edits()
        outcomes, self._pending = self._pending, []
        self.last_outcomes = self.last_outcomes + outcomes
        if not outcomes:
            return
        if self._skips_on_device(optimizer):
            optimizer.found_inf = Outcome.combine(self.last_outcomes)
        elif self.was_skipped():
            self._hide_grads()

    def _skips_on_device(self, optimizer: Optimizer) -> bool:
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        new = [
            param
            for param in self.params()
            if param.grad is not None and not self._has_stepped(optimizer, param)
        ]
        if new and not self.was_skipped():
            self._stepped.update(id(param) for param in new)
        return not new

    def _has_stepped(self, optimizer: Optimizer, param: Tensor) -> bool:
        return id(param) in self._stepped or param in optimizer.state

    def _hide_grads(self) -> None:
        for param in self.params():
            if param.grad is not None:
                self._hidden.append((param, param.grad))
                param.grad = None

    def after_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        """Completes a step; the hook that runs after `optimizer.step`."""
        if self._step is not sys._getframe(1):
            return
        self._step = None
        vars(optimizer).pop("found_inf", None)
        for param, grad in self._hidden:
            param.grad = grad
        self._hidden = []
        self.masters.copy_to_model()
        self.masters.drop_grads()
        self._listener.exit_step(self)

    def was_skipped(self) -> bool:
        """Whether the last step was skipped; one host sync if the optimizer skips on the device."""
        return Outcome.read_all(self.last_outcomes)

    def _check_model_grads(self) -> None:
        if not self.masters.drop_restarted() or self._warned:
            return
        self._warned = True
        logger.warning(
            "gradients of the half model changed after the block of scale_loss that made them, and the "
            "step does not see that: call backward() inside scale_loss, and edit amp.master_params(optimizer)"
        )

    # What masters make necessary: both reach the model's parameters, which are not in the groups

    def zero_grad(self, original: Callable[..., None], *args: object, **kwargs: object) -> None:
        """Clears the gradients of masters and model."""
        original(*args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        for pair in self.masters:
            pair.clear_grad(set_to_none=bool(set_to_none))

    def close(self) -> None:
        """Leaves the gradients unscaled, and takes the model's weights as they are now."""
        self.settle()
        self.masters.take_edits()


def _feed(pairs: list[MasterParam], grads: list[Tensor]) -> None:
    for pair, grad in zip(pairs, grads, strict=True):
        pair.master.grad = grad if pair.master.grad is None else add_grads(pair.master.grad, grad)
        pair.mark_grad_used()

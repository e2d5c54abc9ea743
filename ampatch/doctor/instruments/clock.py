"""Tells the parts of a training run apart: forwards of models, backward passes, attempts at a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ampatch as amp
from ampatch.doctor.instruments.places import Models
from ampatch.doctor.instruments.values import tensors_in


class Listener:
    """Is told of the parts of a run. An attempt is a step of an optimizer, made or skipped by a scaler."""

    def enter_module(self, module: Module, args: tuple) -> None:
        """Called before a module's forward."""

    def see_output(self, module: Module, output: object) -> None:
        """Called after a forward that did not raise."""

    def leave_module(self, module: Module) -> None:
        """Called after it, also if it raised."""

    def see_scale(self, scale: float) -> None:
        """Called before a scaler scales a loss."""

    def see_own_scaler(self, scaler: amp.LossScaler) -> None:
        """Called before a backward pass of a loss that a scaler of ours has scaled."""

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Called before a backward pass from these tensors."""

    def end_backward(self) -> None:
        """Called after it, if it did not raise."""

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Called before an optimizer, or a scaler of torch for it, steps."""

    def see_closure(self, optimizer: Optimizer, runs: bool) -> None:
        """Called before and after the closure that a step was given."""

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Called after it."""


class Follower(Listener):
    """Follows the modules that run, by its `_models`."""

    _models: Models

    def enter_module(self, module: Module, args: tuple) -> None:
        """Learns which models there are."""
        self._models.enter(module)

    def leave_module(self, module: Module) -> None:
        """Follows the modules."""
        self._models.leave()


def listen(listener: Listener, undo: ExitStack) -> None:
    """Tells a listener of what happens, until undone.

    Functions of torch are replaced where there are no hooks: this is for a process of ours.
    """
    undo.callback(register_module_forward_pre_hook(listener.enter_module).remove)
    undo.callback(
        register_module_forward_hook(lambda module, _, output: listener.see_output(module, output)).remove
    )
    undo.callback(
        register_module_forward_hook(
            lambda module, *_: listener.leave_module(module), always_call=True
        ).remove
    )
    attempts = Attempts(listener)
    undo.callback(register_optimizer_step_pre_hook(attempts.begin_step).remove)
    undo.callback(register_optimizer_step_post_hook(lambda optimizer, *_: attempts.end(optimizer)).remove)
    wrap(GradScaler, "step", attempts.of_scaler, undo)
    backwards = Backwards(listener)
    wrap(torch.autograd, "backward", backwards.around, undo)
    undo.enter_context(amp.observe(backwards))
    wrap(GradScaler, "scale", functools.partial(around_scale, listener), undo)


def wrap(owner: object, name: str, wrapper: Callable[..., object], undo: ExitStack) -> None:
    """Has `wrapper(original, *args, **kwargs)` run in the place of a function, until undone."""

    @functools.wraps(getattr(owner, name))
    def replaced(*args, **kwargs):
        return wrapper(replaced.inner, *args, **kwargs)

    replaced.inner, replaced.held = getattr(owner, name), vars(owner)[name]
    setattr(owner, name, replaced)
    undo.callback(_take_out, owner, name, replaced)


def _take_out(owner: object, name: str, replaced: Callable[..., object]) -> None:
    """Ends a replacement; one that is not the outermost leaves the chain: watches end in any order."""
    outer = vars(owner)[name]
    if outer is replaced:
        setattr(owner, name, replaced.held)
        return
    while getattr(outer, "inner", None) not in (None, replaced):
        outer = outer.inner
    if hasattr(outer, "inner"):
        outer.inner, outer.held = replaced.inner, replaced.held


def around_scale(
    listener: Listener, scale: Callable[..., object], scaler: GradScaler, *args, **kwargs
) -> object:
    """Stands in for `GradScaler.scale`."""
    listener.see_scale(scaler.get_scale())
    return scale(scaler, *args, **kwargs)


class ScalerInUse(amp.Observer):
    """Knows the scaler of ours that scaled the latest loss: a script may have several, and use one."""

    scaler: amp.LossScaler | None = None

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Notes it."""
        self.scaler = amp.loss_scalers()[loss_id]

    def on_uninitialize(self) -> None:
        """Forgets it."""
        self.scaler = None


class Backwards(ScalerInUse):
    """Tells of backward passes, but not of those that run inside another, as reentrant checkpoints do."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._is_inside = listener, False

    def around(self, backward: Callable[..., object], *args, **kwargs) -> None:
        """Stands in for `torch.autograd.backward`."""
        if self._is_inside:
            return backward(*args, **kwargs)
        if self.scaler is not None:
            self._listener.see_scale(self.scaler.get_scale())
            self._listener.see_own_scaler(self.scaler)
        self._listener.begin_backward(tuple(tensors_in(args[:1] or kwargs.get("tensors"))))
        self._is_inside = True
        try:
            backward(*args, **kwargs)
        finally:
            self._is_inside = False
        self._listener.end_backward()


def with_closure(args: tuple, kwargs: dict, run: Callable[..., object]) -> tuple[tuple, dict] | None:
    """Returns the arguments of a step, with `run(closure)` for its closure; None where it has none."""
    given = [*args[1:], *kwargs.values()]  # hooks see the optimizer first
    if not any(map(callable, given)):
        return None
    new = [functools.partial(run, each) if callable(each) else each for each in given]
    return (args[0], *new[: len(args) - 1]), dict(zip(kwargs, new[len(args) - 1 :], strict=True))


class Attempts:
    """Counts the step of a scaler and that of the optimizer inside it as one."""

    def __init__(self, listener: Listener) -> None:
        self._listener, self._depth = listener, 0

    def begin(self, optimizer: Optimizer, scaler: GradScaler | None = None) -> None:
        """Tells of the outermost step; classes that call `super().step()` run their hooks twice."""
        self._depth += 1
        if self._depth == 1:
            self._listener.begin_attempt(optimizer, scaler)

    def begin_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """A hook before a step; returns its arguments, with a closure that tells when it runs."""
        self.begin(optimizer)
        return with_closure(args, kwargs, functools.partial(self._run_closure, optimizer))

    def _run_closure(self, optimizer: Optimizer, closure: Callable[..., object], *args, **kwargs) -> object:
        self._listener.see_closure(optimizer, True)
        try:
            return closure(*args, **kwargs)
        finally:
            self._listener.see_closure(optimizer, False)

    def end(self, optimizer: Optimizer) -> None:
        """Tells that it is over."""
        self._depth -= 1
        if self._depth == 0:
            self._listener.end_attempt(optimizer)

    def of_scaler(
        self, step: Callable[..., object], scaler: GradScaler, optimizer: Optimizer, *args, **kwargs
    ) -> object:
        """Stands in for `GradScaler.step`."""
        self.begin(optimizer, scaler)
        try:
            return step(scaler, optimizer, *args, **kwargs)
        finally:
            self.end(optimizer)

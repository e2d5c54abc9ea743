"""Tells the parts of a training run apart: forwards of models, backward passes, attempts at a step."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import FrameType

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import ampatch as amp
from ampatch.doctor.instruments.places import Models, Standing, frames
from ampatch.doctor.instruments.values import quiet, tensors_in
from ampatch.levels.stack import wrap_closure

BACKWARD_OPTIONS = ("tensors", "grad_tensors", "retain_graph", "create_graph")  # by place
MOST_MICRO_STEPS = 4  # that are looked at closely in each attempt: one of hundreds is like another


class Instrument:
    """Is told of the parts of a run. An attempt is a step of an optimizer, made or skipped by a scaler.

    What it computes is neither cast, nor recorded, nor seen by others, if its clock `is_quiet`, and but for
    what it computes of modules that run: torch.compile looks into that.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        clock.add(self)

    def enter_model(self, model: Module, args: tuple) -> None:
        """Called before the forward of a model, which no other module calls."""

    def enter_module(self, module: Module, args: tuple) -> None:
        """Called before each module's forward, of a model after `enter_model`."""

    def see_output(self, module: Module, output: object) -> None:
        """Called after a forward that did not raise."""

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Called before a backward pass from these tensors."""

    def end_backward(self) -> None:
        """Called after it, if it did not raise."""

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Called before an optimizer, or a scaler of torch for it, steps."""

    def end_closure(self, optimizer: Optimizer) -> None:
        """Called after the closure that a step was given, which may run several times."""

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Called after the step."""


def wrap(owner: object, name: str, wrapper: Callable[..., object], undo: ExitStack) -> None:
    """Has `wrapper(original, *args, **kwargs)` run in the place of a function, until undone.

    Of several the latest is the outermost. They may end in any order: what another stands on goes with that.
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def standing(*args: object, **kwargs: object) -> object:
        return wrapper(original, *args, **kwargs) if standing.is_on else original(*args, **kwargs)

    def end() -> None:
        standing.is_on = False
        while not getattr(vars(owner)[name], "is_on", True):
            setattr(owner, name, vars(owner)[name].before)

    standing.is_on, standing.before = True, vars(owner)[name]
    setattr(owner, name, standing)
    undo.callback(end)


def unscaled() -> float:
    return 1.0


class Clock(amp.Observer):
    """Follows a run, and tells listeners of it, in the order in which they were made.

    `part` is what runs outside of models: "input", "loss" or "optimizer". `scaler` is the one of ours that
    scaled the latest loss: a script may have several, and use one.
    """

    def __init__(self, undo: ExitStack, is_quiet: bool = True) -> None:
        self.undo, self.models, self.attempt = undo, Models(), 0
        self._is_quiet = is_quiet
        self._told: defaultdict[str, list[Callable[..., None]]] = defaultdict(list)  # by event
        self.running: list[int] = []  # ids of modules
        self.part, self.in_backward = "input", False
        self.changed: list[Parameter] = []  # those whose gradients the latest backward pass made
        self.repeats = False  # what has run before, in a backward pass
        self.within: object = None  # the node of a function of the script's whose own backward runs
        self.autocasts: set[str] = set()  # devices for which torch.autocast has been on
        self.get_scale = unscaled  # of the latest loss, in the present attempt; may wait for the device
        self.backward_options: dict[str, object] = {}  # of the latest backward pass, by their names
        self.micro_step = 0  # how many backward passes there were in this attempt
        self.has_closure = False  # whether the step that runs makes the gradients itself
        self.is_made = False  # whether the optimizer was stepped in this attempt, and not only its scaler
        self._step: FrameType | None = None  # that runs
        self.scaler: amp.LossScaler | None = None
        self.failed: dict[Instrument, str] = {}  # which looks no more, and its error

    @property
    def phase(self) -> str:
        """What runs: "forward", "backward" inside of one of the script's own, or `part`."""
        if self.within is not None:
            return "backward"
        return "forward" if self.models.is_inside and self.part != "optimizer" else self.part

    @property
    def latest_pass(self) -> int:
        """The backward pass to which belongs what runs: a step belongs to the last before it."""
        return max(0, self.micro_step - 1) if self.part == "optimizer" else self.micro_step

    @property
    def is_away(self) -> bool:
        """Whether a backward pass runs, and no checkpoint repeats its forward."""
        return self.in_backward and not self.repeats

    def _begin_part(self) -> None:
        """Nothing of a micro-step has run as yet."""
        self.part = "input"
        self.running.clear()
        self.models.restore()

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        self.scaler = amp.loss_scalers()[loss_id]

    def on_uninitialize(self) -> None:
        """Drops the scaler, which ends with its session."""
        self.scaler = None

    def add(self, listener: Instrument) -> None:
        """Tells a listener of the events that it has methods for."""
        for name, method in vars(Instrument).items():
            if inspect.isfunction(method) and getattr(type(listener), name) is not method:
                self._told[name].append(getattr(listener, name))

    def ask(self, listener: Instrument, look: Callable[..., object], *given: object) -> object:
        """Has a listener look; one that fails, by a fault of ours, looks no more, and the script goes on."""
        try:
            return look(*given)
        except Exception as error:
            self.failed[listener] = f"{type(error).__name__}: {error}"
            for told in self._told.values():
                told[:] = [method for method in told if method.__self__ is not listener]
            return None

    def _tell(self, name: str, *given: object) -> None:
        for tell in self._told[name]:
            tell(*given)

    def _tell_quietly(self, name: str, *given: object) -> None:
        with quiet() if self._is_quiet and self._told[name] else nullcontext():
            self._tell(name, *given)

    def follow_run(self) -> None:
        """Follows all of a run, until undone."""
        self.follow_modules()
        self.follow_steps()

    def follow_steps(self, backward: tuple[object, str] = (torch.autograd, "backward")) -> None:
        """Follows steps, and passes of a function that goes backward, until undone; replaces functions."""
        self.undo.callback(register_optimizer_step_pre_hook(self._begin_step).remove)
        self.undo.callback(register_optimizer_step_post_hook(self._end_step).remove)
        self.wrap(GradScaler, "step", self._step_by_scaler)
        self.wrap(GradScaler, "scale", self._scale)
        self.wrap(*backward, self._go_backward)
        self.undo.enter_context(amp.observe(self))

    def wrap(self, owner: object, name: str, wrapper: Callable[..., object]) -> None:
        wrap(owner, name, wrapper, self.undo)

    # ---- Modules ----

    def follow_modules(self) -> None:
        """Follows the modules that run, until undone."""
        self.undo.callback(register_module_forward_pre_hook(self._enter).remove)
        self.undo.callback(register_module_forward_hook(self._see_output).remove)
        self.undo.callback(register_module_forward_hook(self._leave, always_call=True).remove)

    def _enter(self, module: Module, args: tuple) -> None:
        self.running.append(id(module))
        if self.models.enter(module):
            self.part = self.part if self.in_backward else "loss"  # what follows the model
            self._tell("enter_model", module, args)
        self._tell("enter_module", module, args)

    def _see_output(self, module: Module, args: tuple, output: object) -> None:
        self._tell("see_output", module, output)

    def _leave(self, module: Module, *_: object) -> None:
        del self.running[-1:]
        self.models.leave()

    # ---- Backward passes ----

    def _scale(self, scale: Callable[..., object], scaler: GradScaler, *args, **kwargs) -> object:
        self.get_scale = scaler.get_scale
        return scale(scaler, *args, **kwargs)

    def _go_backward(self, backward: Callable[..., object], *args, **kwargs) -> None:
        """Stands in for such a function; a pass inside another, as of a checkpoint, is part of it."""
        if self.in_backward:
            return backward(*args, **kwargs)
        if self.scaler is not None:
            self.get_scale = self.scaler.get_scale
        self.backward_options = dict(zip(BACKWARD_OPTIONS, args, strict=False)) | kwargs
        with self.backward(tuple(tensors_in(self.backward_options.pop("tensors")))):
            backward(*args, **kwargs)

    @contextmanager
    def backward(self, losses: tuple[Tensor, ...]) -> Iterator[None]:
        """Tells of a backward pass from these tensors that is made inside."""
        self._tell_quietly("begin_backward", losses)
        before = [
            (parameter, parameter.grad, getattr(parameter.grad, "_version", -1))
            for parameter in self.models.parameters()
        ]
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False
        self.changed = [
            parameter
            for parameter, grad, version in before
            if parameter.grad is not None and (parameter.grad is not grad or grad._version != version)
        ]
        self._begin_part()
        self._tell_quietly("end_backward")
        self.micro_step += 1

    @contextmanager
    def at(self, place: Standing, node: object = None) -> Iterator[None]:
        """A backward that the script itself has written runs inside, of the `node` of a function at a place.

        Without one a checkpoint repeats its operations there, which then have a graph.
        """
        before = self.models.save(), self.within, self.repeats
        self.within, self.repeats = node or self.within, node is None or self.repeats
        self.models.restore(*place)
        try:
            yield
        finally:
            standing, self.within, self.repeats = before
            self.models.restore(*standing)

    # ---- Steps ----

    def _begin(self, step: FrameType, optimizer: Optimizer, scaler: GradScaler | None = None) -> None:
        """Tells of the outermost step; classes that call `super().step()` run their hooks twice."""
        if self._step is not None and any(frame is self._step for frame in frames()):
            return
        self._step, self.is_made, self.part = step, False, "optimizer"
        self._tell_quietly("begin_attempt", optimizer, scaler)

    def _end(self, step: FrameType, optimizer: Optimizer) -> None:
        """Tells that it is over."""
        if self._step is not step:
            return
        self._step = None
        self._begin_part()
        try:
            self._tell_quietly("end_attempt", optimizer)
        finally:
            self.attempt, self.micro_step, self.get_scale = self.attempt + 1, 0, unscaled

    def _begin_step(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        changed = wrap_closure(args, kwargs, functools.partial(self._run_closure, optimizer))
        self.has_closure = changed is not None
        self._begin(sys._getframe(1), optimizer)
        self.is_made = True
        return changed

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        self._end(sys._getframe(1), optimizer)

    def _run_closure(self, optimizer: Optimizer, closure: Callable[..., object], *args, **kwargs) -> object:
        self.part = "input"
        try:
            return closure(*args, **kwargs)
        finally:
            self.part = "optimizer"
            self._tell_quietly("end_closure", optimizer)

    def _step_by_scaler(
        self, step: Callable[..., object], scaler: GradScaler, optimizer: Optimizer, *args, **kwargs
    ) -> object:
        """Stands in for `GradScaler.step`, which may step the optimizer inside."""
        self.has_closure = False
        self._begin(sys._getframe(), optimizer, scaler)
        try:
            return step(scaler, optimizer, *args, **kwargs)
        finally:
            self._end(sys._getframe(), optimizer)

"""Follows gradients from a scaled loss to the step: what is scaled, unscaled, clipped, and what is not.

The doctor itself follows those of `torch.amp.GradScaler`. Where ampatch scales, the library warns of misuse,
and the doctor notes its warnings.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

import ampatch as amp
from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.places import SHOWN, is_called_by_doctor, parameters_of, user_line
from ampatch.doctor.instruments.tape import Op, nodes_of
from ampatch.doctor.instruments.values import is_finite, plain, tensors_in
from ampatch.doctor.silent.notes import WARNED, Notes

CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_")
MOST_EMPTY = 3
RENEWED = 3  # attempts in a row, each with a scaler of its own
TINY = 1e-15  # whose square float32 holds


@dataclass(slots=True)
class Gradient:
    """What a gradient is made of, since it was made or zeroed.

    `scaler` is set while some of it is scaled; `raw` is the line of a backward pass without a scale;
    `was_unscaled` says that some of it has been divided by a scale, `stepped` is the version that a step has
    used, and `is_old` says that a backward pass has added to that.
    """

    scaler: GradScaler | None = None
    raw: str | None = None
    was_unscaled: bool = False
    stepped: int | None = None
    is_old: bool = False


@dataclass(slots=True)
class LossOfScaler:
    """A loss that a scaler has scaled: the node of the graph that did, and whether a backward reached it."""

    scaler: GradScaler
    node: object
    where: str | None
    attempt: int
    is_finite: bool
    was_used: bool = False


class Scaled(Instrument, amp.Observer):
    """Follows the gradients of all models that run; costs a host sync a scaled loss."""

    def __init__(self, clock: Clock, notes: Notes) -> None:
        super().__init__(clock)
        self._notes = notes
        self._gradients = WeakTensorKeyDictionary()
        self._losses: list[LossOfScaler] = []
        self._has_scaler = self.was_asked = False
        self._backwards = 0
        self._stepped_at: str | None = None  # since torch.autocast has forgotten its casts
        self._empty = 0  # steps in a row without a gradient
        self._penalty: str | None = None  # a gradient of a scaled loss, until the scale is asked for
        self._waiting, self._longest, self._waits_at = 0, 1, None  # scaled losses without a step
        self._now: tuple[GradScaler | None, str | None] | None = None  # of the backward that runs
        self._scalers = WeakKeyDictionary[GradScaler, str | None]()  # that scaled no loss yet, where made
        self._renewed: list[int] = []  # attempts in a row whose first loss a new scaler scaled
        clock.wrap(GradScaler, "__init__", self._make_scaler)
        clock.wrap(GradScaler, "scale", self._scale)
        clock.wrap(GradScaler, "unscale_", self._unscale)
        clock.wrap(GradScaler, "get_scale", self._get_scale)
        for owner in (Optimizer, Module):
            clock.wrap(owner, "zero_grad", self._zero_grad)
        for owner, name in itertools.product((clip_grad, torch.nn.utils), CLIPS):
            if hasattr(owner, name):
                clock.wrap(owner, name, self._clip)
        clock.wrap(torch.nn.utils, "get_total_norm", self._measure)
        clock.wrap(torch.autograd, "grad", self._grad)
        clock.wrap(Optimizer, "load_state_dict", self._load)
        clock.wrap(torch, "clear_autocast_cache", self._forget_casts)
        self._blocks: dict[int, tuple[int, str | None]] = {}  # of `scale_loss`, by the id of the loss
        clock.undo.enter_context(amp.observe(self))

    def close(self) -> None:
        """Notes what was never used up to the end of the run."""
        self._tell_unused(self._losses)
        if self._waiting > 3 * self._longest:
            self._tell("never_stepped", "scale", self._waits_at, "loss", count=self._waiting)

    def _forget_casts(self, clear: Callable[[], None]) -> None:
        self._stepped_at = None
        clear()

    def _load(self, load: Callable[..., None], optimizer: Optimizer, *args, **kwargs) -> None:
        """Notes second moments that are 0 where the first ones are not: a checkpoint held them in half."""
        load(optimizer, *args, **kwargs)
        pairs = [
            (state["exp_avg"], state["exp_avg_sq"])
            for state in optimizer.state.values()
            if "exp_avg_sq" in state
        ]
        lost = sum(((first.abs() > TINY) & (second == 0)).sum().item() for first, second in pairs)
        if lost:
            self._tell("lost_state", "load_state_dict", user_line(), lost=lost)

    # ---- The parts of a run ----

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        self._blocks[loss_id] = self._backwards, user_line()

    def on_backward(self, loss_id: int) -> None:
        """Notes a block without a backward pass."""
        backwards, where = self._blocks.pop(loss_id, (-1, None))
        if backwards == self._backwards:
            self._tell("scaled_not_backpropagated", "scale_loss", where, "loss")

    def enter_model(self, model: Module, args: tuple) -> None:
        """Asks whether casts of the weights before the latest step are still in use."""
        is_on = any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and torch.is_autocast_cache_enabled()
        if self._stepped_at is not None and is_on and torch.is_grad_enabled():
            self._tell("stale_weights", "step", self._stepped_at, attempt=self.clock.attempt - 1)

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Asks whether a scaled loss is part of it, and what gradients there are."""
        self._backwards += 1
        self._now = None
        for parameter in (
            self.clock.models.parameters() if self.clock.micro_step == 0 or self._has_scaler else ()
        ):
            self._forget_zeros(parameter)
        if not self._has_scaler:
            return
        reached = self._reach(losses)
        if not reached and any(loss.numel() > 1 for loss in losses):
            return  # it is given gradients to begin with, which may be scaled
        self._now = reached[0].scaler if reached else None, user_line()

    def end_backward(self) -> None:
        """Notes of which kind the new gradients are."""
        for known in map(self._known, self.clock.changed):
            known.is_old = known.stepped is not None
        if self._now is None:
            return
        scaler, where = self._now
        for parameter in self.clock.changed:
            known = self._gradients.setdefault(parameter.grad, Gradient())
            if scaler is None:
                known.raw = known.raw or where
            else:
                known.scaler = scaler
        self._now, self.was_asked = None, False

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """Looks at what is about to be stepped."""
        self._longest, self._waiting = max(self._longest, self._waiting), 0
        if not self.clock.has_closure:  # which makes others
            self._look_at_gradients(optimizer)
        if self._penalty is not None:
            self._tell("scaled_penalty", "grad", self._penalty, "loss")
            self._penalty = None
        if scaler is not None and scaler.is_enabled():
            self._tell_raw(optimizer)
        elif (scale := self.scale_of(parameters_of(optimizer))) is not None:
            self._tell("not_unscaled", "step", user_line(), scale=scale)

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        """Notes a step of old gradients, or of none, as of parameters that the model has no more."""
        where = user_line()
        self._stepped_at = where if is_in_autocast() else None
        grads, now = self._of(optimizer), self.clock.attempt
        self._empty = 0 if grads or not self.clock.changed else self._empty + 1
        if grads and all(known.is_old for _, known in grads):
            self._tell("not_zeroed", "step", where)
        elif grads and all(known.stepped == parameter.grad._version for parameter, known in grads):
            self._tell("stepped_twice", "step", where, attempt=max(now - 1, 0))
        elif self._empty == MOST_EMPTY:
            self._tell("no_gradients", "step", where, attempt=now + 1 - MOST_EMPTY)

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Notes what was stepped; a loss that was scaled an attempt ago has not been used."""
        for parameter, _ in self._of(optimizer):
            self._gradients[parameter.grad] = Gradient(stepped=parameter.grad._version)
        now = self.clock.attempt
        self._tell_unused(loss for loss in self._losses if loss.attempt < now)
        # The graphs of the others are kept no longer than they wait.
        self._losses = [loss for loss in self._losses if loss.attempt >= now and not loss.was_used]

    # ---- What is replaced ----

    def _make_scaler(self, init: Callable[..., None], scaler: GradScaler, *args, **kwargs) -> None:
        init(scaler, *args, **kwargs)
        self._scalers[scaler] = user_line()

    def _note_renewed(self, scaler: GradScaler) -> None:
        """Notes a scaler that is made anew for each step, and so forgets at which scale a loss overflowed."""
        now, is_new = self.clock.attempt, scaler in self._scalers
        where = self._scalers.pop(scaler, None)
        is_next = self._renewed[-1:] == [now - 1] or not self._renewed
        if self._renewed[-1:] != [now]:
            self._renewed = [*(self._renewed if is_next else ()), now] if is_new else []
        if len(self._renewed) == RENEWED:
            first, scale = self._renewed[0], scaler.get_scale()
            self._tell("renewed_scaler", "GradScaler", where, attempt=first, scale=scale)

    def _scale(self, scale: Callable[..., object], scaler: GradScaler, outputs: object) -> object:
        scaled = scale(scaler, outputs)
        if scaler.is_enabled():
            self._note_renewed(scaler)
            self._has_scaler = True
            self._waiting, self._waits_at = self._waiting + 1, user_line()
            losses = [tensor for tensor in tensors_in(scaled) if tensor.grad_fn is not None]
            self._losses += [
                LossOfScaler(scaler, loss.grad_fn, user_line(), self.clock.attempt, is_finite(loss))
                for loss in losses
            ]
        return scaled

    def _unscale(self, unscale: Callable[..., None], scaler: GradScaler, optimizer: Optimizer) -> None:
        try:
            unscale(scaler, optimizer)
        except RuntimeError as error:
            if "already been called" in str(error) or "after step()" in str(error):
                self._tell("unscaled_twice", "unscale_", user_line())
            raise
        if not scaler.is_enabled():
            return
        self._tell_raw(optimizer)
        grads = self._of(optimizer)
        if any(known.was_unscaled for _, known in grads):
            self._tell("unscaled_twice", "unscale_", user_line(), scale=scaler.get_scale())
        for parameter, _ in grads:
            self._gradients[parameter.grad] = Gradient(was_unscaled=True)

    def _get_scale(self, get_scale: Callable[..., float], scaler: GradScaler) -> float:
        if not is_called_by_doctor():
            self.was_asked, self._penalty = True, None
        return get_scale(scaler)

    def _zero_grad(self, zero_grad: Callable[..., None], owner: Module | Optimizer, *args, **kwargs) -> None:
        zero_grad(owner, *args, **kwargs)
        self._forget(owner.parameters() if isinstance(owner, Module) else parameters_of(owner))

    def _clip(self, clip: Callable[..., object], *args: object, **kwargs: object) -> object:
        bound = inspect.signature(clip).bind(*args, **kwargs).arguments
        parameters, limit = bound.pop("parameters"), bound.get("max_norm", bound.get("clip_value"))
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        scale = None if self.was_asked else self.scale_of(params)
        if scale is not None:
            kind = "clipped_while_scaled" if limit < float("inf") else "not_unscaled"
            self._tell(kind, clip.__name__.lstrip("_"), user_line(), limit=float(limit), scale=scale)
        return clip(parameters=params, **bound)

    def _measure(self, measure: Callable[..., Tensor], tensors: Iterable[Tensor], *args, **kwargs) -> Tensor:
        grads = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        scale = None if self.was_asked else self._scale_in(map(self._gradients.get, grads))
        if scale is not None:
            self._tell("not_unscaled", "get_total_norm", user_line(), scale=scale)
        return measure(grads, *args, **kwargs)

    def _grad(self, grad: Callable[..., object], outputs: object, *args, **kwargs) -> object:
        self._backwards += 1
        if self._reach(tuple(tensors_in(outputs))) and kwargs.get("create_graph"):
            self._penalty = user_line()
        return grad(outputs, *args, **kwargs)

    def on_misuse(self, kind: str, line: tuple[str, int]) -> None:
        if kind in WARNED:
            file, number = line
            fault, op = WARNED[kind]
            self._tell(fault, op, f"{file.removeprefix(SHOWN)}:{number}")

    # ---- What is known ----

    def scale_of(self, parameters: Iterable[Tensor]) -> float | None:
        """Returns the scale that gradients of some of these are multiplied by; None if none is, or by 1."""
        return self._scale_in(map(self._known, parameters))

    def _scale_in(self, gradients: Iterable[Gradient | None]) -> float | None:
        scalers = (known.scaler for known in gradients if known is not None and known.scaler is not None)
        scale = next((scaler.get_scale() for scaler in scalers), 1)
        return scale if scale != 1 else None

    def _known(self, parameter: Tensor) -> Gradient:
        known = None if parameter.grad is None else self._gradients.get(parameter.grad)
        return known or Gradient()

    def _of(self, optimizer: Optimizer) -> list[tuple[Tensor, Gradient]]:
        return [
            (parameter, self._known(parameter))
            for parameter in parameters_of(optimizer)
            if parameter.grad is not None
        ]

    def _forget(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self._gradients.pop(parameter.grad, None)

    def _forget_zeros(self, parameter: Parameter) -> None:
        """A gradient that a script has zeroed by itself is new."""
        known = self._known(parameter)
        is_mixed = known.raw is not None or known.was_unscaled or known.stepped is not None
        if is_mixed and not plain(parameter.grad).any():
            self._forget([parameter])

    def _reach(self, roots: tuple[Tensor, ...]) -> list[LossOfScaler]:
        """Marks and returns the scaled losses that a backward from these reaches, new ones if there are."""
        known = {id(loss.node): loss for loss in self._losses}
        reached = [known[id(node)] for node in nodes_of(roots) if id(node) in known] if known else []
        losses = [loss for loss in reached if not loss.was_used] or reached
        for loss in losses:
            loss.was_used = True
        return losses

    def _tell(self, kind: str, op: str, where: str | None, phase: str = "optimizer", **numbers) -> None:
        self._notes.add(kind, Op(op, phase, None, where), **numbers)

    def _tell_unused(self, losses: Iterable[LossOfScaler]) -> None:
        for loss in losses:
            if loss.is_finite and not loss.was_used:
                self._tell("scaled_not_backpropagated", "scale", loss.where, "loss", attempt=loss.attempt)

    def _tell_raw(self, optimizer: Optimizer) -> None:
        """Notes a backward that was not scaled, whose gradients a scaler takes for scaled ones."""
        for line in dict.fromkeys(known.raw for _, known in self._of(optimizer) if known.raw is not None):
            self._tell("unscaled_backward", "backward", line, "backward")


def is_in_autocast() -> bool:
    """Says whether a region of torch.autocast is open, which keeps the casts of weights."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth > 0

"""Observers: what tools such as the sweep and the doctor, or a script of its own, are told of a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.levels.policy import Policy
from ampatch.levels.stack import Line, find_line, warn
from ampatch.session.request import Opening, SessionListener
from ampatch.session.session import SESSION
from ampatch.steps.block import ScaledLoss
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.alarms.history import ScaleUpdate


class Observer:
    """Gets told what happens; tools override the methods they need.

    The methods run inside the training loop. None of them may change tensors, and one that reads
    a value from the device costs the loop a host sync. `loss_id` is numbered across calls of
    `initialize`, as in `state_dict`.
    """

    counts_casts = False
    """Whether `cast_counts` is wanted in sessions that open while this watches; costs 0.2 µs a cast."""

    def on_initialize(self, policy: Policy) -> None:
        """Called when `initialize` has set up a call that is enabled."""

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Called after `on_initialize` with what the call was given."""

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Called when a block of `scale_loss` begins; `loss` is detached and not scaled."""

    def on_backward(self, loss_id: int) -> None:
        """Called when such a block has ended without an exception."""

    def on_step_begin(self, optimizer: Optimizer) -> None:
        """Called before a step of an initialized optimizer does anything."""

    def on_step(self, optimizer: Optimizer) -> None:
        """Called after each step of an initialized optimizer, skipped or not."""

    def on_scale(self, update: ScaleUpdate, loss_id: int) -> None:
        """Called for each step of a loss when the host knows what became of it, maybe some steps later."""

    def on_misuse(self, kind: str, line: tuple[str, int]) -> None:
        """Called when the library warns of a kind of misuse; `line` is the file and the number."""

    def on_report(self, metrics: dict[str, object]) -> None:
        """Called with what the script passed to `report`."""

    def on_uninitialize(self) -> None:
        """Called before a session is undone."""


class Observers(SessionListener):
    """Hands the events of the session on to observers; hears of them while there is one."""

    def __init__(self) -> None:
        self.all: tuple[Observer, ...] = ()

    def change(self, observers: tuple[Observer, ...]) -> None:
        """Tells these from now on."""
        if bool(observers) != bool(self.all):
            hear = SESSION.events.add if observers else SESSION.events.remove
            hear(self)
        self.all = observers

    def call_opens(self, opening: Opening) -> None:
        """Has casts counted where somebody wants it."""
        if opening.request.policy.patch_torch_functions and any(one.counts_casts for one in self.all):
            SESSION.torch_patch.count_casts()

    def call_is_set_up(self, opening: Opening) -> None:
        """Tells of the call; if one raises, it is undone."""
        request = opening.request
        for observer in self.all:
            observer.on_initialize(request.policy)
            observer.on_objects(request.models, request.optimizers)

    def block_begins(self, block: ScaledLoss) -> None:
        with torch._C.DisableTorchFunction():  # a mode of theirs takes it for a part of the loss
            loss = block.loss.detach()
        for observer in self.all:
            observer.on_loss(loss, block.scaler.loss_id)

    def block_ended(self, block: ScaledLoss) -> None:
        for observer in self.all:
            observer.on_backward(block.scaler.loss_id)

    def step_begins(self, amp: AmpOptimizer) -> None:
        for observer in self.all:
            observer.on_step_begin(amp.optimizer)

    def step_ended(self, amp: AmpOptimizer) -> None:
        for observer in self.all:
            observer.on_step(amp.optimizer)

    def session_closes(self, _: None) -> None:
        """Tells all of them, whatever one raises."""
        with ExitStack() as stack:
            for observer in self.all:
                stack.callback(observer.on_uninitialize)

    def tell_scale(self, update: ScaleUpdate, loss_id: int) -> None:
        """Tells what became of a step of a loss."""
        for observer in self.all:
            observer.on_scale(update, loss_id)


# Observers outlive a session, and are those of the process, as the session is.
OBSERVERS = Observers()


def report(**metrics: object) -> None:
    """Reports results of a script, such as `accuracy=0.98`, to the tool that runs it, if any."""
    for observer in OBSERVERS.all:
        observer.on_report(metrics)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Tells an observer what happens while the context is open."""
    OBSERVERS.change((*OBSERVERS.all, observer))
    try:
        yield
    finally:
        OBSERVERS.change(tuple(item for item in OBSERVERS.all if item is not observer))


def observers() -> tuple[Observer, ...]:
    """Returns the observers that are told what happens, in the order in which they began."""
    return OBSERVERS.all


class Warner:
    """Says each kind of thing once: in the log, and as a warning that points at a line."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def forget(self) -> None:
        """Lets everything be said again."""
        self._warned.clear()

    def has_warned(self, kind: str) -> bool:
        """Whether a kind of misuse was warned of."""
        return kind in self._warned

    def warn(self, kind: str, text: str, line: Line | None = None) -> None:
        """Warns of a kind of misuse; `line` is the one to change, by default the one that runs."""
        if kind not in self._warned:
            self._warned.add(kind)
            line = line or find_line()
            for observer in observers():
                observer.on_misuse(kind, line)
            warn(text, line)

"""How tools look into a session: an observer is told what happens, functions say what is there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ampatch.casts.cast_counter import CastCounts
from ampatch.levels.policy import Policy
from ampatch.session.alarms.history import ScaleUpdate
from ampatch.session.session import SESSION
from ampatch.steps.outcome import BackwardOutcome


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

    def on_report(self, metrics: dict[str, object]) -> None:
        """Called with what the script passed to `report`."""

    def on_uninitialize(self) -> None:
        """Called before a session is undone."""


def master_pairs(optimizer: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterates over the half parameters of a model and their float32 masters, in pairs (O2 and O5).

    A write into either shows in the other after the next step or forward. There are no
    pairs at other levels. Raises AmpError for an optimizer that `initialize` did not return.
    """
    if not SESSION.is_passive((optimizer,)):
        for weight in SESSION.find(optimizer)[0].masters:
            if weight.master is not None:
                yield weight.half, weight.master


def backward_outcomes(optimizer: object) -> tuple[BackwardOutcome, ...]:
    """Returns what the backward passes that led to the optimizer's last step did, for dynamic scales.

    A `BackwardOutcome` knows whether its pass overflowed and the scale before and after: `poll` returns
    them once the device has delivered them, without a host sync. Static scales have no outcomes.
    """
    return () if SESSION.is_passive((optimizer,)) else tuple(SESSION.find(optimizer)[0].last_outcomes)


def cast_counts() -> CastCounts:
    """Returns how many casts patched functions used since the session opened, and the bytes of kept ones.

    Counted only if an `Observer` with `counts_casts` watched when it opened, and outside compiled code;
    the bytes are always known.
    """
    counter = SESSION.torch_patch.counter
    made, reused = (counter.made, counter.reused) if counter else (0, 0)
    return CastCounts(made, reused, SESSION.casts.nbytes)


def report(**metrics: object) -> None:
    """Reports results of a script, such as `accuracy=0.98`, to the tool that runs it, if any."""
    for observer in SESSION.observers:
        observer.on_report(metrics)


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """Tells an observer what happens while the context is open."""
    SESSION.observers += (observer,)
    try:
        yield
    finally:
        SESSION.observers = tuple(item for item in SESSION.observers if item is not observer)


def observers() -> tuple[Observer, ...]:
    """Returns the observers that are told what happens, in the order in which they began."""
    return SESSION.observers

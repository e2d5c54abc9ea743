"""The public functions by which tools look into a session, and scripts tell tools what they found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from ampatch.casts.cast_counter import CastCounts
from ampatch.session.observe import Observer
from ampatch.session.session import SESSION
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.scaler import LossScaler


def master_pairs(optimizer: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterates over the half parameters of a model and their float32 masters, in pairs (O2 and O5).

    A write into either shows in the other after the next step or forward. There are no
    pairs at other levels. Raises AmpError for an optimizer that `initialize` did not return.
    """
    SESSION.require_open()
    if not SESSION.is_passive((optimizer,)):
        for weight in SESSION.find(optimizer)[0].masters:
            if weight.master is not None:
                yield weight.half, weight.master


def loss_scalers(*, of_last_call: bool = False) -> tuple[LossScaler, ...]:
    """Returns the loss scalers of the session, numbered as `state_dict` numbers them."""
    SESSION.require_open()
    return tuple(SESSION.scalers(of_last_call=of_last_call))


def backward_outcomes(optimizer: object) -> tuple[BackwardOutcome, ...]:
    """Returns what the backward passes that led to the optimizer's last step did, for dynamic scales.

    A `BackwardOutcome` knows whether its pass overflowed and the scale before and after: `poll` returns
    them once the device has delivered them, without a host sync. Static scales have no outcomes.
    """
    SESSION.require_open()
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

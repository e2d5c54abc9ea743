"""How tools look into a session: its masters, what its last steps did, the casts that it counts."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ampatch.casts.cast_counter import CastCounts
from ampatch.session.session import SESSION
from ampatch.steps.outcome import BackwardOutcome


def master_pairs(optimizer: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterates over the half parameters of a model and their float32 masters, in pairs (O2 and O5).

    A write into either shows in the other after the next step or forward. There are no
    pairs at other levels. Raises AmpError for an optimizer that `initialize` did not return.
    """
    if not SESSION.is_passive((optimizer,)):
        for weight in SESSION.find(optimizer).masters:
            if weight.master is not None:
                yield weight.half, weight.master


def backward_outcomes(optimizer: object) -> tuple[BackwardOutcome, ...]:
    """Returns what the backward passes that led to the optimizer's last step did, for dynamic scales.

    A `BackwardOutcome` knows whether its pass overflowed and the scale before and after: `poll` returns
    them once the device has delivered them, without a host sync. Static scales have no outcomes.
    """
    return () if SESSION.is_passive((optimizer,)) else tuple(SESSION.find(optimizer).last_outcomes)


def cast_counts() -> CastCounts:
    """Returns how many casts patched functions used since the session opened, and the bytes of kept ones.

    Counted only if an `Observer` with `counts_casts` watched when it opened, and outside compiled code;
    the bytes are always known.
    """
    counter = SESSION.torch_patch.counter
    made, reused = (counter.made, counter.reused) if counter else (0, 0)
    return CastCounts(made, reused, SESSION.casts.nbytes)

"""A session that lasts for one block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import ampatch as amp


@contextmanager
def session(
    opt_level: str = "O1", model: object = None, optimizer: object = None, **kwargs: object
) -> Iterator[object]:
    """Opens a session for the length of a block, and yields what `amp.initialize` returns.

    >>> with session("O4") as model:
    ...     model(torch.ones(1, 1)).dtype
    torch.bfloat16

    Without a model, a small one on the CPU is initialized: at O1 and O4 it makes functions cast tensors
    on its device. `kwargs` are those of `amp.initialize`; `verbosity` is 0 unless it is given. The block
    may end with an exception. Raises AmpValueError if a session is open already: one block would undo
    what another one opened.
    """
    if is_open():
        raise amp.AmpValueError("a session is open already: close it with ampatch.uninitialize() first")
    model = make_model() if model is None else model
    try:
        arguments = {"opt_level": opt_level, "verbosity": 0, **kwargs}
        yield amp.initialize(model, optimizer, **arguments)  # type: ignore[call-overload]  # checked there
    finally:
        amp.uninitialize()


def make_model(device: torch.device | str = "cpu") -> torch.nn.Module:
    """A small model on a device; torch's random numbers go on as if it had not been made."""
    with torch.random.fork_rng(devices=[]):
        return torch.nn.Linear(1, 1).to(device)


def is_open() -> bool:
    """Whether `initialize` was called, and `uninitialize` not since."""
    try:
        amp.get_loss_scale()
    except amp.NotInitializedError:
        return False
    return True

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


class _Product(torch.nn.Module):
    """Multiplies by a function: a layer would be refused at O6 where there is no float8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, self.weight)


def make_model(device: torch.device | str = "cpu") -> torch.nn.Module:
    return _Product().to(device)


def is_open() -> bool:
    """Whether `initialize` was called, and `uninitialize` not since."""
    try:
        amp.get_loss_scale()
    except amp.NotInitializedError:
        return False
    return True

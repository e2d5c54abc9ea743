"""Opens a session of ampatch for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Module
from torch.optim import Optimizer

import ampatch as amp


@contextmanager
def open_session(model: Module, level: str | None, optimizer: Optimizer | None = None) -> Iterator[None]:
    """Initializes model and optimizer, and undoes it when the block ends; None leaves them plain."""
    if level is None:
        yield
        return
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    try:
        yield
    finally:
        amp.uninitialize()

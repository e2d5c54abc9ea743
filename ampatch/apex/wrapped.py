"""Finds the optimizers inside a wrapper such as LARC or Lookahead."""

from __future__ import annotations

from collections.abc import Iterator

from torch.optim import Optimizer


def list_wrapped(given: object) -> Iterator[object]:
    """Yields a wrapper, what it keeps, and so on down to the innermost optimizer."""
    while given is not None:
        yield given
        given = _look_inside(given)


def _look_inside(given: object) -> object:
    named = getattr(given, "optim", None) or getattr(given, "optimizer", None)
    kept = vars(given).values() if hasattr(given, "__dict__") else ()
    return named or next((value for value in kept if isinstance(value, Optimizer)), None)

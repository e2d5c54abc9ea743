"""Seeds: every run begins with its own, and what the script itself sets is shifted by it."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from numbers import Integral
from types import ModuleType

import torch

from ampatch.levels.patcher import Patcher

SHIFT = 10_007  # a prime: scripts add ranks and epochs to their seeds
LIMIT = 2**32  # of NumPy's seeds

try:
    import numpy
except ImportError:  # which torch does not need
    numpy = None

Seed = Callable[..., object]


def set_seeds(seed: int) -> None:
    """Seeds Python, NumPy and torch, on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy is not None:
        numpy.random.seed(seed % LIMIT)


@contextmanager
def restored_seeds() -> Iterator[None]:
    """Has everything draw after the block what it would have drawn without it."""
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)


@contextmanager
def shifted_seeds(seed: int) -> Iterator[None]:
    """Shifts the seeds that a script sets, so that each run differs in what the script draws.

    With seed 0 nothing is changed. Generators that the script makes for itself keep their seeds: these are
    often what splits the data, which should be the same in all runs.
    """
    with ExitStack() as undo:
        undo.callback((patcher := Patcher()).retry)
        for module, name in _places() if seed else ():
            patcher.replace(module, name, _shifted(getattr(module, name), seed * SHIFT))
        yield


def _places() -> list[tuple[ModuleType, str]]:
    # On a GPU torch.manual_seed calls torch.cuda.manual_seed_all, and is shifted twice: as different as once.
    places = [(torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed")]
    for module in (torch.cuda, torch.cuda.random):
        places += [(module, "manual_seed"), (module, "manual_seed_all")]
    return places if numpy is None else [*places, (numpy.random, "seed")]


def _shifted(original: Seed, shift: int) -> Seed:
    """Returns a seeding function that adds `shift` to whole numbers; it keeps its own names."""

    @functools.wraps(original)
    def seed(*args, **kwargs):
        first = [_shift(value, shift) for value in args[:1]]
        named = {name: _shift(value, shift) for name, value in kwargs.items() if name in ("seed", "a")}
        return original(*first, *args[1:], **kwargs | named)

    return seed


def _shift(value: object, shift: int) -> object:
    return (int(value) + shift) % LIMIT if isinstance(value, Integral) else value

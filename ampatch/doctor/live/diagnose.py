"""Watches models and optimizers from Python, and explains a step that breaks: `amp.diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch.nn import Module

import ampatch as amp
from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.live.watcher import Patient, Watcher
from ampatch.steps.foreign_step import find_hooked

__all__ = ["Patient", "patient", "watch"]

Object = TypeVar("Object")


@contextmanager
def watch(models: object, optimizers: object, scaler: object = None) -> Iterator[Patient]:
    """Watches training steps while the context is open; replays one that breaks, and says what broke it.

    ```python
    with amp.diagnose.watch(model, optimizer) as patient:
        train()
    print(patient)
    ```

    For models and optimizers of `initialize`, for `torch.autocast` with a `GradScaler`, and for plain
    training. `models` and `optimizers` are one or a list; what runs is what calls `model(...)`, not another
    method. `scaler` is the `GradScaler`, if any; it is found without being named. Findings are logged as
    they are made. On the way out every hook is taken away again.

    Costs one fused check of the gradients a step where no loss scaler makes one, which a GPU is waited for
    once. Keeps the inputs of the last step alive. Raises AmpTypeError for what is no model or optimizer.
    """
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise amp.AmpTypeError(f"scaler is a {type(scaler).__name__}: expected a torch.amp.GradScaler")
    patient = Patient()
    with ExitStack() as undo:
        clock = Clock(undo, is_quiet=False)  # a replay is seen by instruments
        watched = listed(models, "models", "torch.nn.Module", find_module)
        listed_optimizers = [] if optimizers is None else optimizers
        stepped = listed(listed_optimizers, "optimizers", "torch.optim.Optimizer", find_hooked)
        watcher = Watcher(clock, watched, stepped, patient)
        del models, optimizers, scaler, listed_optimizers, watched, stepped  # the script may drop them
        undo.enter_context(amp.observe(patient))
        watcher.open()
        yield patient


def patient() -> Patient:
    """Returns what `watch`, or `initialize(..., diagnose=True)`, found: of the latest that is open.

    Raises AmpError where none is.
    """
    found = [observer for observer in amp.observers() if isinstance(observer, Patient)]
    if not found:
        raise amp.AmpError(
            "nothing is watched: pass diagnose=True to initialize, or open amp.diagnose.watch(...)"
        )
    return found[-1]


def find_module(given: object) -> Module | None:
    return given if isinstance(given, Module) else None


def listed(given: object, name: str, expected: str, find: Callable[[object], Object | None]) -> list[Object]:
    """Returns what is found in one object or in each of a list; raises AmpTypeError where that is nothing."""
    found = []
    for index, one in enumerate(given if isinstance(given, (list, tuple)) else [given]):
        if (inner := find(one)) is None:
            raise amp.AmpTypeError(f"{name}[{index}] is a {type(one).__name__}: expected a {expected}")
        found.append(inner)
    return found

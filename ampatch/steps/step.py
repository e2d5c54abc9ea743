"""One step of an optimizer: how it is skipped after an overflow."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.steps.outcome import BackwardOutcome

logger = logging.getLogger("ampatch")


def drop_after_overflow(
    optimizer: Optimizer, params: Sequence[Tensor], outcomes: Sequence[BackwardOutcome]
) -> None:
    """Drops the gradients of a step that would be skipped, where nobody is left to skip it."""
    if BackwardOutcome.read_all(outcome for outcome in outcomes if outcome.capture is None):
        for param in params:
            param.grad = None
        logger.warning(
            "uninitialize: gradients of %s had overflowed, and were dropped: the step that they were made "
            "for would have been skipped",
            type(optimizer).__name__,
        )


def list_params(optimizer: Optimizer) -> list[Tensor]:
    """Returns the parameters in the groups of an optimizer."""
    return [param for group in optimizer.param_groups for param in group["params"]]


class SkipStep:
    """Skips steps of one optimizer.

    One that takes `found_inf` (a fused one) skips on the device without a host sync; for others the
    step costs one, and is skipped by hiding the gradients from it. So is the first step of a parameter
    in a fused optimizer, which would make its state from nothing (SGD's from uninitialized memory).
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._put: tuple[Tensor, Tensor | None] | None = None  # our found_inf, and that of a GradScaler
        self._stepped: set[int] = set()  # params that a fused optimizer keeps no state for

    def begin(self, optimizer: Optimizer) -> None:
        """Forgets what a step that raised may have left."""
        if self._hidden:
            self._hidden = []
        if self._put is not None:
            self._take_away(optimizer)

    def skip_after_overflow(self, optimizer: Optimizer, outcomes: list[BackwardOutcome]) -> None:
        """Has the step that begins change nothing if any outcome is an overflow."""
        new: list[Tensor] = []  # which the optimizer is about to step for the first time
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            stepped, state = self._stepped, optimizer.state
            new = [
                param
                for param in list_params(optimizer)
                if id(param) not in stepped and param not in state and param.grad is not None
            ]
            if not new:
                return self._put_found_inf(optimizer, BackwardOutcome.combine(outcomes))
        if BackwardOutcome.read_all(outcomes):
            for param in list_params(optimizer):
                if param.grad is not None:
                    self._hidden.append((param, param.grad))
                    param.grad = None
        else:
            self._stepped.update(map(id, new))

    def end(self, optimizer: Optimizer) -> None:
        """Puts hidden gradients back."""
        if self._put is not None:
            self._take_away(optimizer)
        if self._hidden:
            for param, grad in self._hidden:
                param.grad = grad
            self._hidden = []

    def _put_found_inf(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        theirs = vars(optimizer).get("found_inf")
        both = found_inf if theirs is None else torch.maximum(found_inf, theirs.to(found_inf.device))
        self._put = both, theirs
        optimizer.found_inf = both  # type: ignore[attr-defined]

    def _take_away(self, optimizer: Optimizer) -> None:
        put, self._put = self._put, None
        if put is not None and vars(optimizer).get("found_inf") is put[0]:
            del optimizer.found_inf  # type: ignore[attr-defined]
            if put[1] is not None:
                optimizer.found_inf = put[1]  # type: ignore[attr-defined]

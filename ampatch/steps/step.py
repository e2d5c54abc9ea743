"""One step of an optimizer: how it is skipped after an overflow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ampatch.steps.outcome import BackwardOutcome


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
        self._hidden = []
        self._take_away(optimizer)

    def skip_after_overflow(
        self, optimizer: Optimizer, params: Sequence[Tensor], outcomes: list[BackwardOutcome]
    ) -> None:
        """Has the step that begins change nothing if any outcome is an overflow."""
        takes_found_inf = getattr(optimizer, "_step_supports_amp_scaling", False)
        stepped, state = self._stepped, optimizer.state
        new = [  # which the optimizer is about to step for the first time
            param
            for param in (params if takes_found_inf else ())
            if id(param) not in stepped and param not in state and param.grad is not None
        ]
        if takes_found_inf and not new:
            self._put_found_inf(optimizer, BackwardOutcome.combine(outcomes))
        elif BackwardOutcome.read_all(outcomes):
            hidden = [(param, param.grad) for param in params if param.grad is not None]
            for param, _ in hidden:
                param.grad = None
            self._hidden += hidden
        else:
            stepped.update(map(id, new))

    def end(self, optimizer: Optimizer) -> None:
        """Puts hidden gradients back."""
        self._take_away(optimizer)
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

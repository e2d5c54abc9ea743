"""The loss scales of a run, and the steps that overflows skipped, read when the device has told of them."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque

import ampatch as amp
from ampatch.sweeps.measure.curve import CurveBuilder, changes
from ampatch.sweeps.rows import Curve

BATCH = 64  # outcomes that are looked at together


class ScaleHistory:
    """Follows every scaler; costs no host sync before `settle`."""

    def __init__(self) -> None:
        self._curves: dict[int, CurveBuilder] = defaultdict(CurveBuilder)
        self._last: dict[int, tuple[int, float]] = {}  # what follows the last step, by the id of the loss
        self._skipped = array("q")
        self._pending: deque[tuple[int, amp.BackwardOutcome]] = deque()
        self._is_dynamic = False
        self._static: list[amp.LossScaler] = []  # those that follow no overflows; a script may set them

    def note_scalers(self) -> None:
        """Looks at the scalers of the session."""
        scalers = amp.loss_scalers()
        self._is_dynamic = any(scaler.is_dynamic for scaler in scalers)
        self._static = [scaler for scaler in scalers if not scaler.is_dynamic]

    def add_step(self, step: int, optimizer: object) -> None:
        """Takes the scales of a step, and what the backward passes did that led to it."""
        for scaler in self._static:
            self._curves[scaler.loss_id].add(step, scaler.get_scale())
        if not self._is_dynamic:
            return
        for outcome in amp.backward_outcomes(optimizer):
            self._pending.append((step, outcome))
        if len(self._pending) >= BATCH:
            self._poll()

    def _poll(self) -> None:
        while self._pending:
            step, outcome = self._pending[0]
            values = outcome.poll()
            if values is None:
                return
            self._pending.popleft()
            self._take(step, outcome.loss_id, *values)

    def _take(self, step: int, loss_id: int, overflowed: bool, before: float, after: float) -> None:
        self._curves[loss_id].add(step, before)
        self._last[loss_id] = step + 1, after
        if overflowed and step not in self._skipped[-1:]:
            self._skipped.append(step)

    def settle(self) -> None:
        """Reads what is still on the device; waits for it."""
        for step, outcome in self._pending:
            self._take(step, outcome.loss_id, *outcome.read())
        self._pending.clear()

    def skipped(self) -> tuple[int, ...]:
        """Returns the steps that were skipped."""
        return tuple(self._skipped)

    def build(self) -> dict[str, Curve]:
        """Returns the curves of the scales, where they changed, and what is left after the last step."""
        for loss_id, (step, scale) in self._last.items():
            self._curves[loss_id].add(step, scale)
        return {str(loss_id): changes(it.build()) for loss_id, it in sorted(self._curves.items())}

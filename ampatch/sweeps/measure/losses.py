"""The losses of a run: a curve for each, and what they are at its beginning and end."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection

import torch
from torch import Tensor

from ampatch.sweeps.measure.curve import CurveBuilder
from ampatch.sweeps.records.record import LAST_LOSSES, Curve

BATCH = 64  # steps whose losses are read together


class LossCurve:
    """One loss over the steps; of several in a step, their mean."""

    def __init__(self) -> None:
        self._builder = CurveBuilder()
        self._step = 0
        self._sum = 0.0
        self._count = 0
        self.first: list[float] = []
        self.last: deque[float] = deque(maxlen=LAST_LOSSES)

    def add(self, step: int, value: float) -> None:
        """Takes a value."""
        if step != self._step:
            self._close()
            self._step = step
        self._sum += value
        self._count += 1

    def _close(self) -> None:
        if not self._count:
            return
        mean, self._sum, self._count = self._sum / self._count, 0.0, 0
        self._builder.add(self._step, mean)
        self.last.append(mean)
        if len(self.first) < LAST_LOSSES:
            self.first.append(mean)

    def build(self) -> Curve:
        """Ends the last step and returns the curve."""
        self._close()
        return self._builder.build()


class Losses:
    """The losses of a run by their id, each at the step that uses it; read many at a time."""

    def __init__(self) -> None:
        self._curves: dict[int, LossCurve] = {}
        self._present: list[tuple[int, Tensor | float]] = []  # of the step to come
        self._waiting: list[tuple[int, list[tuple[int, Tensor | float]]]] = []

    def add(self, loss_id: int, loss: Tensor) -> None:
        """Takes a loss, as it is now: scripts accumulate losses in place."""
        if loss.is_cpu:
            value = loss.item() if loss.numel() == 1 else loss.double().mean().item()
        else:
            value = loss.clone() if loss.numel() == 1 else loss.float().mean()
        self._present.append((loss_id, value))

    def end_step(self, step: int) -> None:
        """Takes the losses since the last step for those of this one."""
        self._waiting.append((step, self._present))
        self._present = []
        if len(self._waiting) >= BATCH:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting = self._waiting, []
        values = [(step, loss_id, value) for step, losses in waiting for loss_id, value in losses]
        numbers = iter(_read_tensors([value for *_, value in values if isinstance(value, Tensor)]))
        for step, loss_id, value in values:
            curve = self._curves.get(loss_id)
            if curve is None:
                curve = self._curves[loss_id] = LossCurve()
            curve.add(step, next(numbers) if isinstance(value, Tensor) else value)

    def build(self) -> dict[str, Curve]:
        """Returns the curves; call it once, when the run is over, after the last `end_step`."""
        self._read()
        return {str(loss_id): curve.build() for loss_id, curve in sorted(self._curves.items())}

    def first(self) -> float | None:
        """Returns the mean of the first losses, over all ids; None if there were none."""
        return mean_of([mean_of(curve.first) for curve in self._curves.values()])

    def final(self) -> float | None:
        """Returns the mean of the last losses, over all ids."""
        return mean_of([mean_of(curve.last) for curve in self._curves.values()])

    def noise(self) -> float | None:
        """Returns the standard error of the last losses' mean; None if there are not two of each."""
        lasts = [curve.last for curve in self._curves.values()]
        if not lasts or any(len(last) < 2 for last in lasts):
            return None
        errors = [_standard_error(list(last)) for last in lasts]
        return math.sqrt(sum(error * error for error in errors)) / len(errors)


def _read_tensors(losses: list[Tensor]) -> list[float]:
    """Reads numbers from the device; one host sync for all."""
    if not losses:
        return []
    return torch.stack([loss.reshape(()).to(losses[0].device, torch.float32) for loss in losses]).tolist()


def _standard_error(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def mean_of(values: Collection[float]) -> float | None:
    """Returns the mean, None of no values; `fmean` would raise for inf and -inf."""
    return sum(values) / len(values) if values else None

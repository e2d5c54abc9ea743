"""The losses of a run: a curve for each, and what they are at its beginning and end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from ampatch.sweeps.judge.statistics import deviation, mean
from ampatch.sweeps.measure.curve import CurveBuilder, averaged, mean_by_step
from ampatch.sweeps.rows import LAST_LOSSES
from ampatch.tools.tensors import read_numbers

BATCH = 64  # steps whose losses are read together


class Losses:
    """The losses of a run by their id, each at the step that uses it; read many at a time."""

    def __init__(self) -> None:
        self._curves: dict[int, CurveBuilder] = defaultdict(CurveBuilder)
        self._present: list[tuple[int, Tensor | float]] = []  # of the step to come
        self._waiting: list[tuple[int, int, Tensor | float]] = []
        self._steps = 0  # that wait

    def add(self, loss_id: int, loss: Tensor) -> None:
        """Takes a loss, as it is now: scripts accumulate losses in place."""
        if loss.is_cpu:
            value = loss.item() if loss.numel() == 1 else loss.double().mean().item()
        else:
            value = loss.clone() if loss.numel() == 1 else loss.float().mean()
        self._present.append((loss_id, value))

    def end_step(self, step: int) -> None:
        """Takes the losses since the last step for those of this one."""
        self._waiting += [(step, loss_id, value) for loss_id, value in self._present]
        self._present.clear()
        self._steps += 1
        if self._steps >= BATCH:
            self._read()

    def _read(self) -> None:
        waiting, self._waiting, self._steps = self._waiting, [], 0
        numbers = iter(read_numbers([value for *_, value in waiting if isinstance(value, Tensor)]))
        for step, loss_id, value in waiting:
            self._curves[loss_id].add(step, next(numbers) if isinstance(value, Tensor) else value)

    def fields(self) -> dict[str, object]:
        """Returns fields of a `Run`: the curves, and their means at both ends, over all of them.

        Call it when the run is over, after the last `end_step`. The noise is the standard error of the last
        losses' mean; None if there are not two of each.
        """
        self._read()
        curves = {str(loss_id): mean_by_step(it.build()) for loss_id, it in sorted(self._curves.items())}
        lasts = [curve.values[-LAST_LOSSES:] for curve in curves.values()]
        known = bool(lasts) and all(len(last) > 1 for last in lasts)
        return {
            "losses": {loss_id: averaged(curve) for loss_id, curve in curves.items()},
            "first_loss": mean([mean(curve.values[:LAST_LOSSES]) for curve in curves.values()]),
            "final_loss": mean(list(map(mean, lasts))),
            "loss_noise": math.hypot(*map(_standard_error, lasts)) / len(lasts) if known else None,
        }


def _standard_error(values: Sequence[float]) -> float:
    return deviation(values) / math.sqrt(len(values))

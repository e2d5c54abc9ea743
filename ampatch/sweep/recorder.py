"""Listens to a training run and measures it."""

import time
from collections import defaultdict, deque
from collections.abc import Mapping
from pathlib import Path

import torch

import ampatch as amp
from ampatch.sweep.memory import peak_memory
from ampatch.sweep.record import Measured
from ampatch.sweep.steps import StepCounter, StepTimes

LAST_LOSSES = 10


class Recorder(amp.Observer):
    """Measures one run by what observers are told; losses are not read before the end."""

    def __init__(self, progress: Path) -> None:
        self._initialized = False
        self._counter = StepCounter(progress)
        self._times = StepTimes()
        self._skipped = 0
        self._losses: dict[int, deque[torch.Tensor]] = defaultdict(lambda: deque(maxlen=LAST_LOSSES))
        self._metrics: dict[str, object] = {}
        self._loss_scale: float | None = None

    def on_initialize(self, policy: object) -> None:
        """Notes that the script uses ampatch at all."""
        self._initialized = True

    def on_loss(self, loss: torch.Tensor, loss_id: int) -> None:
        """Keeps a copy, since scripts accumulate losses in place; it is read when all is over."""
        self._losses[loss_id].append(loss.clone())

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the time and counts."""
        now = time.perf_counter()
        self._times.add(optimizer, now)
        self._counter.add(now)
        self._skipped += amp.step_was_skipped(optimizer)

    def on_report(self, metrics: Mapping[str, object]) -> None:
        """Keeps the last value of each metric."""
        self._metrics.update(metrics)

    def on_uninitialize(self) -> None:
        """Reads the loss scale while there is one."""
        self._loss_scale = self._read_loss_scale()
        self._times.forget_optimizers()

    def measured(self) -> Measured:
        """Sums up; call it once, when the script has ended."""
        memory, peak_mib = peak_memory()
        return Measured(
            initialized=self._initialized,
            steps=self._counter.steps,
            skipped_steps=self._skipped,
            step_ms=self._times.median_ms(),
            memory=memory,
            peak_mib=peak_mib,
            final_loss=mean_of([loss for kept in self._losses.values() for loss in kept]),
            loss_scale=self._read_loss_scale() or self._loss_scale,
            metrics=dict(numbers_in(self._metrics)),
        )

    def _read_loss_scale(self) -> float | None:
        try:
            return min(amp.get_loss_scale(loss_id) for loss_id in self._losses or (0,))
        except amp.AmpError:  # no session, or one with fewer losses than an earlier one
            return None


def mean_of(losses: list[torch.Tensor]) -> float | None:
    """Returns the mean over all the values of all the losses, None if there are none."""
    means = [float(loss.double().mean()) for loss in losses]
    return sum(means) / len(means) if means else None


def numbers_in(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns those metrics that `float` takes: numbers, tensors of one element, arrays of one."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            continue
    return found

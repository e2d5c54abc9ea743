"""Listens to a training run and measures it."""

from __future__ import annotations

import operator
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.sweeps.measure.curve import CurveBuilder, averaged
from ampatch.sweeps.measure.load import Load
from ampatch.sweeps.measure.losses import Losses
from ampatch.sweeps.measure.memory import kept_mib, peak_memory, sample_weights
from ampatch.sweeps.measure.reads import ReadWatch
from ampatch.sweeps.measure.scales import ScaleHistory
from ampatch.sweeps.measure.steps import DeviceClock, HostClock, StepTimes
from ampatch.sweeps.rows import Curve, Ending

if TYPE_CHECKING:  # which imports torch's compiler
    from ampatch.sweeps.measure.yardstick import Autocast

LARGEST_STEP = 2**53  # up to which floats are whole numbers
LOOKED_AT = 2  # the step before which bytes are counted: the first with all of the optimizer's state
LEAST_STEPS = 6  # of a run that is cut short: three of them are timed


class EnoughSteps(BaseException):
    """Ends a script that has made as many steps as it should."""


class Recorder(amp.Observer):
    """Measures one run by what observers are told.

    On a GPU time is taken by events, and losses and scales are read later: it costs no host sync a step.
    Raises EnoughSteps out of the step after which `limit` steps are done, or more than both `limits` were
    needed (seconds, and seconds of the processors), after `tell_limit`, and out of any that a script makes
    nevertheless; nothing of these is measured.
    """

    def __init__(
        self,
        limit: int | None = None,
        tell_limit: Callable[[], None] | None = None,
        reads: ReadWatch | None = None,
        limits: tuple[float, float] | None = None,
    ) -> None:
        self.yardstick: Autocast | None = None
        self._limit, self._limits, self._tell_limit = limit, limits, tell_limit
        self._outcome = Ending.FINISHED
        self._is_over = self._initialized = self._refused = False
        self._times = StepTimes(HostClock())
        self._losses, self._scales = Losses(), ScaleHistory()
        self._metrics: dict[str, CurveBuilder] = defaultdict(CurveBuilder)
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref] = []
        self._kept: float | None = None
        self._cast_bytes = 0  # before a backward: steps forget casts, and over ranks backwards do
        self._start: tuple[float, ...] = ()
        self._began: int | None = None  # of the first step
        self._load: Load | None = None  # from then on
        self._reads = reads

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Notes the models, and takes the device's time if they are on a GPU."""
        self._initialized = True
        self._models += map(weakref.ref, models)
        self._optimizers += map(weakref.ref, optimizers)
        if not self._times.steps and any(p.is_cuda for model in models for p in model.parameters()):
            self._times = StepTimes(DeviceClock())
        self._scales.note_scalers()

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Keeps the loss."""
        if self._is_over:
            return
        self._losses.add(loss_id, loss)
        if self._times.steps < LOOKED_AT:
            self._cast_bytes = amp.cast_counts().cached_bytes

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at what is in memory, before the first steps."""
        if self._times.steps >= LOOKED_AT:
            return
        models = [model for it in self._models if (model := it()) is not None]
        optimizers = [optimizer for it in self._optimizers if (optimizer := it()) is not None]
        if self._began is None:
            self._start, self._began = sample_weights(models), time.time_ns()
            if self._reads is not None:
                self._reads.look()
        self._kept = kept_mib(models, optimizers, self._cast_bytes)

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step, and the script, if these were enough."""
        if self._is_over:
            raise EnoughSteps
        is_new = self._times.end_step(optimizer)
        steps = self._times.steps
        self._losses.end_step(steps)
        self._scales.add_step(steps, optimizer)
        self._load = self._load or Load()
        if is_new and self._has_enough(steps):
            self._is_over = True
            if self._tell_limit is not None:
                self._tell_limit()
            raise EnoughSteps

    def _has_enough(self, steps: int) -> bool:
        if self._limit is not None and steps >= self._limit:
            return True
        if self._limits is None or steps < LEAST_STEPS:
            return False
        is_slow = all(map(operator.gt, self._load.passed(), self._limits))
        self._outcome = Ending.CUT if is_slow else self._outcome
        return is_slow

    def on_report(self, metrics: Mapping[str, object]) -> None:
        """Keeps the metrics that are numbers, at the step reported with them, else at the present one."""
        if self._is_over:
            return
        numbers = numbers_in(metrics)
        step = numbers.pop("step", self._times.steps)
        step = int(step) if 0 <= step <= LARGEST_STEP else self._times.steps
        for name, value in numbers.items():
            self._metrics[name].add(step, value)

    def note_error(self, error: Exception) -> None:
        """Takes what ended the script: if `initialize` refused its arguments, the script did call it."""
        self._refused = isinstance(error, amp.AmpError)

    def on_uninitialize(self) -> None:
        """Reads what the session knows, while there is one."""
        self._scales.settle()
        self._times.forget_optimizers()
        self._models, self._optimizers = [], []

    def measured(self, warmup: int = 5) -> dict[str, object]:
        """Sums up, as fields of a `Run`; call it once, when the script has ended."""
        if self._initialized:
            self.on_uninitialize()
        load = self._load.fields(self._times.steps - 1) if self._load else {}
        memory, peak_mib = peak_memory()
        self._losses.end_step(self._times.steps + 1)  # of a step that was never made
        metrics = {name: short_metric(builder.build()) for name, builder in self._metrics.items()}
        scales = self._scales.build()
        read = self._reads.close(self._began) if self._reads else {}
        return {
            "outcome": self._outcome if self._times.steps else Ending.NO_STEPS,
            "initialized": self._initialized or self._refused,
            "steps": self._times.steps,
            "skipped": self._scales.skipped(),
            **self._times.fields(warmup),
            "memory": memory,
            "peak_mib": peak_mib,
            "kept_mib": self._kept,
            **self._losses.fields(),
            "loss_scale": min((it.values[-1] for it in scales.values() if it.values), default=None),
            "loss_scales": scales,
            "metrics": metrics,
            "start": self._start,
            **load,
            "began": self._began,
            **read,
            "uncast": self.yardstick is not None and self.yardstick.has_cast is False,
            "device": torch.cuda.get_device_name() if memory == "device" else "cpu",
            "threads": torch.get_num_threads(),
        }


def short_metric(curve: Curve) -> Curve:
    """Returns the curve of a metric at its length in files, with its last value in the place of a mean."""
    short = averaged(curve)
    return Curve(short.steps, (*short.values[:-1], *curve.values[-1:]))


def numbers_in(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns those metrics that `float` takes: numbers, tensors of one element, arrays of one."""
    found = {}
    for name, value in metrics.items():
        try:
            found[name] = float(value.detach() if isinstance(value, Tensor) else value)
        except Exception:  # of objects of any kind: to be measured must not end a script
            continue
    return found

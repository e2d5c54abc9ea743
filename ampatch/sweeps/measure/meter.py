"""Listens to a training run and measures it: times of steps, losses, skipped steps, memory, metrics."""

from __future__ import annotations

import math
import operator
import sys
import time
import weakref
from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import ampatch as amp
from ampatch.sweeps.judge.statistics import deviation, mean, quartiles
from ampatch.sweeps.measure.load import Load
from ampatch.sweeps.measure.reads import ReadWatch
from ampatch.sweeps.rows import LAST_LOSSES, WARMUP, Curve, Ending
from ampatch.tools.tensors import read_numbers

if TYPE_CHECKING:  # which imports torch's compiler
    from ampatch.sweeps.measure.yardstick import Autocast

LARGEST_STEP = 2**53  # up to which floats are whole numbers
LEAST_STEPS = 6  # of a run that is cut short: three of them are timed
BATCH = 64  # steps that are looked at together: one at a time costs ten times as much, in a cold cache
LONGEST_ROUND = 20  # steps of the optimizer that steps most, for one of that which steps least
POINTS = 1000  # of a curve in a file
WEIGHTS = 32  # that tell where a run started
MIB = 2**20


class EnoughSteps(BaseException):
    """Ends a script that has made as many steps as it should."""


class TrainingMeter(amp.Observer):
    """Measures one run by what observers are told.

    On a GPU time is taken by events, and losses and overflows are read later: it costs no host sync a step.
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
        self._losses, self._overflows = Losses(), Overflows()
        self._metrics: dict[str, CurveBuilder] = defaultdict(CurveBuilder)
        self._models: list[weakref.ref[Module]] = []
        self._start: tuple[float, ...] = ()
        self._began: int | None = None  # of the first step
        self._load: Load | None = None  # from then on
        self._reads = reads

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Remembers the models, and takes the device's time if they are on a GPU."""
        self._initialized = True
        self._models += map(weakref.ref, models)
        if not self._times.steps and any(p.is_cuda for model in models for p in model.parameters()):
            self._times = StepTimes(DeviceClock())
        self._overflows.look_at_scalers()

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        if not self._is_over:
            self._losses.add(loss_id, loss)

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Looks at the weights and files that training starts from."""
        if self._began is not None:
            return
        models = [model for find in self._models if (model := find()) is not None]
        self._start, self._began = sample_weights(models), time.time_ns()
        if self._reads is not None:
            self._reads.look()

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends a step, and the script, if these were enough."""
        if self._is_over:
            raise EnoughSteps
        is_new = self._times.end_step(optimizer)
        steps = self._times.steps
        self._losses.end_step(steps)
        self._overflows.add_step(steps, optimizer)
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

    def record_error(self, error: Exception) -> None:
        """Takes what ended the script: if `initialize` refused its arguments, the script did call it."""
        self._refused = isinstance(error, amp.AmpError)

    def on_uninitialize(self) -> None:
        """Reads what the session knows, while there is one."""
        self._overflows.settle()
        self._times.forget_optimizers()
        self._models = []

    def measured(self) -> dict[str, object]:
        """Sums up, as fields of a `Run`; call it once, when the script has ended."""
        if self._initialized:
            self.on_uninitialize()
        load = self._load.fields(self._times.steps - 1) if self._load else {}
        memory, peak_mib = peak_memory()
        self._losses.end_step(self._times.steps + 1)  # of a step that was never made
        read = self._reads.close(self._began) if self._reads else {}
        return {
            "outcome": self._outcome if self._times.steps else Ending.NO_STEPS,
            "initialized": self._initialized or self._refused,
            "steps": self._times.steps,
            **self._times.fields(),
            "memory": memory,
            "peak_mib": peak_mib,
            **self._losses.fields(),
            **self._overflows.fields(),
            "metrics": {name: short_metric(builder.build()) for name, builder in self._metrics.items()},
            "start": self._start,
            **load,
            "began": self._began,
            **read,
            "uncast": self.yardstick is not None and self.yardstick.has_cast is False,
            "device": torch.cuda.get_device_name() if memory == "device" else "cpu",
            "threads": torch.get_num_threads(),
        }


def numbers_in(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns those metrics that `float` takes: numbers, tensors of one element, arrays of one."""
    numbers = {}
    for name, value in metrics.items():
        with suppress(Exception):  # of objects of any kind: to be measured must not end a script
            numbers[name] = float(value.detach() if isinstance(value, Tensor) else value)
    return numbers


# ---- Curves: kept whole while a run goes on, and short when it is over ----


class CurveBuilder:
    """Collects the values of a curve, 16 bytes each."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def add(self, step: int, value: float) -> None:
        """Adds the next value."""
        self._steps.append(step)
        self._values.append(value)

    def build(self) -> Curve:
        return Curve(tuple(self._steps), tuple(self._values))


def mean_by_step(curve: Curve) -> Curve:
    """Makes one value of several that follow each other in a step.

    >>> mean_by_step(Curve((1, 1, 2), (1.0, 3.0, 5.0)))
    Curve(steps=(1, 2), values=(2.0, 5.0))
    """
    points = groupby(zip(curve.steps, curve.values, strict=True), key=operator.itemgetter(0))
    values = {step: [value for _, value in group] for step, group in points}
    return Curve(tuple(values), tuple(sum(group) / len(group) for group in values.values()))


def averaged(curve: Curve, limit: int = POINTS) -> Curve:
    """Returns a curve of at most `limit` points, each the mean of neighbours at the step of the last of them.

    >>> averaged(Curve((1, 2, 3, 4, 5), (10.0, 20.0, 30.0, 40.0, 50.0)), limit=3)
    Curve(steps=(2, 4, 5), values=(15.0, 35.0, 50.0))
    """
    steps, values = curve.steps, curve.values
    width = max(1, -(-len(steps) // limit))
    parts = [values[at : at + width] for at in range(0, len(values), width)]
    ends = [*steps[width - 1 :: width], *(steps[-1:] if len(steps) % width else ())]
    return Curve(tuple(ends), tuple(sum(part) / len(part) for part in parts))


def short_metric(curve: Curve) -> Curve:
    """Returns the curve of a metric at its length in files, with its last value in the place of a mean."""
    short = averaged(curve)
    return Curve(short.steps, (*short.values[:-1], *curve.values[-1:]))


# ---- Losses ----


class Losses:
    """The losses of a run by their id, each at the step that uses it; read many at a time."""

    def __init__(self) -> None:
        self._curves: dict[int, CurveBuilder] = defaultdict(CurveBuilder)
        self._present: list[tuple[int, Tensor | float]] = []  # of the step to come
        self._waiting: list[tuple[int, int, Tensor | float]] = []
        self._steps = 0  # that wait

    def add(self, loss_id: int, loss: Tensor) -> None:
        """Adds a loss, as it is now: scripts accumulate losses in place."""
        if loss.is_cpu:
            value = loss.item() if loss.numel() == 1 else loss.double().mean().item()
        else:
            value = loss.clone() if loss.numel() == 1 else loss.float().mean()
        self._present.append((loss_id, value))

    def end_step(self, step: int) -> None:
        """Counts the losses since the last step as those of this one."""
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
        curves = {
            str(loss_id): mean_by_step(builder.build()) for loss_id, builder in sorted(self._curves.items())
        }
        lasts = [curve.values[-LAST_LOSSES:] for curve in curves.values()]
        known = bool(lasts) and all(len(last) > 1 for last in lasts)
        errors = [deviation(last) / math.sqrt(len(last)) for last in lasts] if known else []
        return {
            "losses": {loss_id: averaged(curve) for loss_id, curve in curves.items()},
            "first_loss": mean([mean(curve.values[:LAST_LOSSES]) for curve in curves.values()]),
            "final_loss": mean(list(map(mean, lasts))),
            "loss_noise": math.hypot(*errors) / len(lasts) if known else None,
        }


# ---- Overflows ----


class Overflows:
    """The steps that overflows skipped, and the loss scales at the end; no host sync before `settle`."""

    def __init__(self) -> None:
        self._skipped = array("q")
        self._pending: deque[tuple[int, amp.BackwardOutcome]] = deque()
        self._is_dynamic = False
        self._scales: dict[int, float] = {}  # by the id of the loss

    def look_at_scalers(self) -> None:
        self._is_dynamic = any(scaler.is_dynamic for scaler in amp.loss_scalers())

    def add_step(self, step: int, optimizer: object) -> None:
        """Adds what the backward passes did that led to a step."""
        if not self._is_dynamic:
            return
        self._pending += [(step, outcome) for outcome in amp.backward_outcomes(optimizer)]
        if len(self._pending) >= BATCH:
            self._poll()

    def _poll(self) -> None:
        while self._pending and (values := self._pending[0][1].poll()) is not None:
            self._add(self._pending.popleft()[0], values[0])

    def _add(self, step: int, overflowed: bool) -> None:
        if overflowed and step not in self._skipped[-1:]:
            self._skipped.append(step)

    def settle(self) -> None:
        """Reads what is still on the device; waits for it."""
        for step, outcome in self._pending:
            self._add(step, outcome.read()[0])
        self._pending.clear()
        with suppress(amp.NotInitializedError):  # it was read when the session ended
            self._scales |= {scaler.loss_id: scaler.get_scale() for scaler in amp.loss_scalers()}

    def fields(self) -> dict[str, object]:
        return {"skipped": tuple(self._skipped), "loss_scale": min(self._scales.values(), default=None)}


# ---- Times ----

Moment = object  # a point in time, which only its clock can read


class HostClock:
    """The clock of a CPU, where an operation is over when it returns; moments are seconds."""

    def __init__(self) -> None:
        self.now = time.perf_counter  # a call less than a method

    def is_over(self, moment: Moment) -> bool:
        return True

    def milliseconds(self, start: Moment, end: Moment) -> float:
        return (end - start) * 1000

    def synchronize(self) -> None:
        """Has nothing to wait for."""


class DeviceClock(HostClock):
    """Moments are CUDA events in the current stream: they cost the loop no host sync."""

    def __init__(self) -> None:
        self.now = self._record

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, moment: torch.cuda.Event) -> bool:
        return moment.query()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


class StepTimes:
    """Times of steps, in milliseconds.

    A step ends where an optimizer steps that has stepped in it before; its time is that since the step of
    the same optimizer before. The first one has no beginning, and no time.
    """

    def __init__(self, clock: HostClock) -> None:
        self.steps = 0
        self._clock = clock
        self._start: Moment | None = None
        self._stepped: set[int] = set()
        self._waiting: deque[tuple[Moment, Moment]] = deque()
        self._counts: dict[int, int] = {}  # steps of each optimizer
        self._milliseconds = array("d")

    def end_step(self, optimizer: object) -> bool:
        """Counts the step of an optimizer; returns whether a step of the run ended."""
        now, key = self._clock.now(), id(optimizer)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._stepped and key not in self._stepped:
            self._stepped.add(key)
            return False
        self.steps += 1
        start, self._start, self._stepped = self._start, now, {key}
        if start is not None:
            self._waiting.append((start, now))
            if len(self._waiting) >= BATCH:
                self._settle()
        return True

    def forget_optimizers(self) -> None:
        """Makes the next step a first one: ids are given out again."""
        self._stepped.clear()
        self._start = None

    def _settle(self) -> None:
        while self._waiting and self._clock.is_over(self._waiting[0][1]):
            self._milliseconds.append(self._clock.milliseconds(*self._waiting.popleft()))

    def fields(self) -> dict[str, float | int]:
        """Sums up the times without the warm-up: fields of a `Run`; none if there are no times."""
        self._clock.synchronize()
        self._settle()
        values = self._in_rounds(after_warmup(self._milliseconds))
        if not values:
            return {}
        low, median, high = quartiles(values)
        return {"step_ms": median, "step_ms_low": low, "step_ms_high": high, "timed": len(values)}

    def _in_rounds(self, values: Sequence[float]) -> Sequence[float]:
        """Averages over rounds of optimizers, if some step more often.

        With five steps of a critic for one of the generator the median step would be one without the latter.
        """
        counts = self._counts.values()
        length = round(max(counts) / min(counts)) if counts else 1
        if not 1 < length <= min(LONGEST_ROUND, len(values)):
            return values
        ends = range(length, len(values) + 1, length)
        return [sum(values[end - length : end]) / length for end in ends]


def after_warmup(values: Sequence[float]) -> Sequence[float]:
    """Leaves out the first values; of a run that is no longer than the warm-up, the first half.

    >>> after_warmup([9, 9, 9, 9, 9, 1]), after_warmup([9, 1])
    ([1], [1])
    """
    return values[WARMUP if len(values) > WARMUP else len(values) // 2 :]


# ---- Memory and weights ----


def peak_memory() -> tuple[str, float | None]:
    """Returns ("device", MiB that torch allocated on all GPUs) if it used one, else ("resident", MiB)."""
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        if allocated := sum(map(torch.cuda.max_memory_allocated, devices)):
            return "device", allocated / MIB
    return "resident", peak_resident_mib()


def peak_resident_mib() -> float | None:
    """Returns the peak resident memory of the process, interpreter included; None on Windows.

    On Linux from /proc: there `ru_maxrss` of a process is never below what its parent had when
    it started it, so a sweep started by a large process would measure that one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(sizes["VmHWM"].split()[0]) / 1024
    if sys.platform == "win32":
        return None
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Begins to look for a new peak, where the system can: in a process that measures several runs."""
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):  # not on Linux, or not allowed
        Path("/proc/self/clear_refs").write_text("5")


def sample_weights(models: Iterable[Module]) -> tuple[float, ...]:
    """Returns the middle element of parameters, evenly chosen: enough to tell weights from others."""
    params = [param for model in models for param in model.parameters() if type(param) is Parameter]
    chosen = [param for param in params if param.numel() and not param.is_meta]
    chosen = chosen[:: len(chosen) // WEIGHTS + 1]
    return tuple(param.detach().flatten()[param.numel() // 2].item() for param in chosen)

"""Listens to a training run and measures it."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

import ampatch as amp
from ampatch.sweeps.measure.curve import CurveBuilder, averaged
from ampatch.sweeps.measure.forwards import Samples, count_samples, watch_forwards
from ampatch.sweeps.measure.losses import Losses, final_loss, first_loss, loss_noise
from ampatch.sweeps.measure.reads import ReadWatch
from ampatch.sweeps.measure.memory import count_bytes, peak_memory, sample_weights
from ampatch.sweeps.measure.scales import ScaleHistory
from ampatch.sweeps.measure.steps import DeviceClock, HostClock, Mark, StepCounter, StepTimes
from ampatch.sweeps.measure.waits import Waiting
from ampatch.sweeps.records.record import Bytes, CastRate, Curve, Measured

if TYPE_CHECKING:  # which imports torch's compiler
    from ampatch.sweeps.measure.yardstick import Autocast

LARGEST_STEP = 2**53  # up to which floats are whole numbers
LOOKED_AT = 2  # the step before which bytes are counted: the first with all of the optimizer's state


class EnoughSteps(BaseException):
    """Ends a script that has made as many steps as it should."""


class Recorder(amp.Observer):
    """Measures one run by what observers are told.

    On a GPU time is taken by events, and losses and scales are read later: it costs no host sync a step.
    Raises EnoughSteps out of the step after which `limit` steps are done, after `tell_limit`, and out of any
    that a script makes nevertheless; nothing of these is measured.
    """

    counts_casts = True

    def __init__(
        self,
        counter: StepCounter | None = None,
        limit: int | None = None,
        tell_limit: Callable[[], None] | None = None,
        reads: ReadWatch | None = None,
    ) -> None:
        self._counter = counter
        self._limit = limit
        self._tell_limit = tell_limit
        self._reads = reads
        self._began: int | None = None
        self.yardstick: Autocast | None = None
        self._is_over = False
        self._initialized = False
        self._refused = False
        self._times = StepTimes(HostClock())
        self._samples = Samples()
        self._waiting: Waiting | None = None  # from the first step on
        self._losses = Losses()
        self._scales = ScaleHistory()
        self._metrics: dict[str, CurveBuilder] = defaultdict(CurveBuilder)
        self._bytes: Bytes | None = None
        self._start: tuple[float, ...] = ()
        self._cast_bytes = 0  # before a backward: steps forget casts, and over ranks backwards do
        self._casts = (0, 0)
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref] = []
        self._hooks = ExitStack()
        self._outermost: Module | None = None  # whose forward runs
        self._forward: Mark | None = None
        self._backward: Mark | None = None
        self._update: Mark | None = None

    def on_objects(self, models: tuple[Module, ...], optimizers: tuple[object, ...]) -> None:
        """Watches the forwards of the models, and takes the device's time if they are on a GPU."""
        self._initialized = True
        self._models += map(weakref.ref, models)
        self._optimizers += map(weakref.ref, optimizers)
        if not self._times.steps and any(p.is_cuda for model in models for p in model.parameters()):
            self._times = StepTimes(DeviceClock())
        self._scales.note_scalers()
        for model in models:
            watch_forwards(model, self._begin_forward, self._end_forward, self._hooks)

    def _begin_forward(self, model: Module, args: tuple, kwargs: dict) -> None:
        if not self._times.present.has_parts:
            return
        # The outermost counts; one that raised never ended, and starts over or is forgotten at the next step.
        if (self._forward is None or self._outermost is model) and torch.is_grad_enabled():
            self._outermost = model
            self._samples.add(id(model), count_samples(args, kwargs))
            self._forward = self._times.clock.mark()

    def _end_forward(self, model: Module, args: tuple, output: object) -> None:
        if self._outermost is model and self._forward is not None:
            self._times.present.forward.append((self._forward, self._times.clock.mark()))
            self._forward = self._outermost = None

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """Keeps the loss, and begins the time of a backward."""
        if self._is_over:
            return
        self._losses.add(loss_id, loss)
        if self._times.steps < LOOKED_AT:
            self._cast_bytes = amp.cast_counts().cached_bytes
        if self._times.present.has_parts:
            self._backward = self._times.clock.mark()

    def on_backward(self, loss_id: int) -> None:
        """Ends the time of a backward, with unscaling."""
        if self._backward is not None:
            self._times.present.backward.append((self._backward, self._times.clock.mark()))
            self._backward = None

    def on_step_begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins the time of an update, and once looks at what is in memory."""
        if self._times.steps < LOOKED_AT:
            models = [model for it in self._models if (model := it()) is not None]
            optimizers = [optimizer for it in self._optimizers if (optimizer := it()) is not None]
            if self._bytes is None:
                self._start = sample_weights(models)
                self._began = time.time_ns()
                if self._reads is not None:
                    self._reads.look()
            self._bytes = count_bytes(models, optimizers, self._cast_bytes)
        if self._times.present.has_parts:
            self._update = self._times.clock.mark()

    def on_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Ends the time of an update, and counts."""
        if self._is_over:
            raise EnoughSteps
        is_new = self._times.end_step(optimizer, self._update)
        self._update = self._forward = self._outermost = None
        steps = self._times.steps
        self._losses.end_step(steps)
        self._scales.add_step(steps, optimizer)
        if not is_new:
            return
        self._samples.end_step()
        self._waiting = self._waiting or Waiting()
        if self._counter is not None:
            self._counter.show(steps, time.perf_counter())
        if self._limit is not None and steps >= self._limit:
            self._end()

    def _end(self) -> None:
        """Measures no more, and ends the script."""
        self._is_over = True
        self.close()
        if self._tell_limit is not None:
            self._tell_limit()
        raise EnoughSteps

    def on_report(self, metrics: Mapping[str, object]) -> None:
        """Keeps the metrics that are numbers, at the step reported with them, else at the present one."""
        if self._is_over:
            return
        numbers = numbers_in(metrics)
        step = numbers.pop("step", self._times.steps)
        step = int(step) if 0 <= step <= LARGEST_STEP else self._times.steps
        if "samples" in numbers:
            self._samples.report(numbers.pop("samples"))
        for name, value in numbers.items():
            self._metrics[name].add(step, value)

    def note_error(self, error: Exception) -> None:
        """Takes what ended the script: if `initialize` refused its arguments, the script did call it."""
        self._refused = isinstance(error, amp.AmpError)

    def on_uninitialize(self) -> None:
        """Reads what the session knows, while there is one."""
        counts = amp.cast_counts()
        made, reused = self._casts
        self._casts = made + counts.made, reused + counts.reused
        self._scales.settle()
        self._times.forget_optimizers()
        self.close()

    def close(self) -> None:
        """Takes the hooks off the models."""
        self._hooks.close()
        self._outermost = None
        self._models, self._optimizers = [], []

    def measured(self, warmup: int = 5) -> Measured:
        """Sums up; call it once, when the script has ended."""
        if self._initialized:
            self.on_uninitialize()
        waits = self._waiting and self._waiting.result(self._times.steps - 1)
        memory, peak_mib = peak_memory()
        steps = self._times.steps
        self._losses.end_step(steps + 1)  # of a step that was never made
        part = self._times.spread_of_part
        losses = self._losses.build()
        return Measured(
            initialized=self._initialized or self._refused,
            steps=steps,
            skipped=self._scales.skipped(),
            step_ms=self._times.spread(warmup),
            forward_ms=part("forward", warmup),
            backward_ms=part("backward", warmup),
            update_ms=part("update", warmup),
            samples=self._samples.median(),
            memory=memory,
            peak_mib=peak_mib,
            bytes=self._bytes,
            casts=CastRate(*[count / steps for count in self._casts]) if steps and any(self._casts) else None,
            losses={loss_id: averaged(curve) for loss_id, curve in losses.items()},
            first_loss=first_loss(losses.values()),
            final_loss=final_loss(losses.values()),
            loss_noise=loss_noise(losses.values()),
            loss_scales=self._scales.build(),
            metrics={name: short_metric(builder.build()) for name, builder in self._metrics.items()},
            start=self._start,
            waits=waits,
            began=self._began,
            uncast=self.yardstick is not None and self.yardstick.has_cast is False,
            read=self._reads and self._reads.close(self._began),
            device=torch.cuda.get_device_name() if memory == "device" else "cpu",
            threads=torch.get_num_threads(),
        )


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

"""Interleaved rounds: each contender is timed once a round, and ratios compare times of one round."""

from __future__ import annotations

import math
import random
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.common import set_torch_threads

Step = Callable[[], None]
Open = Callable[[], AbstractContextManager[Step]]
Clock = Callable[[], float]

WARMUP_STEPS = 2  # torch's timer adds two of its own, or one in a hundred
MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of one contender, one a round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value in the middle."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the middle half of the values lies."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def divide(self, other: Series) -> Series:
        """The ratios, round by round; infinite where the other is zero."""
        pairs = zip(self.values, other.values, strict=True)
        return Series(tuple(a / b if b else math.inf for a, b in pairs))

    def subtract(self, other: Series) -> Series:
        """The differences, round by round."""
        return Series(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))

    def scale(self, factor: float) -> Series:
        """The numbers in another unit."""
        return Series(tuple(value * factor for value in self.values))

    def describe(self) -> dict[str, object]:
        """The numbers as a result holds them; None for what JSON has no number for."""
        low, high = self.quartiles
        rounds = [_keep_finite(value) for value in self.values]
        return {
            "median": _keep_finite(self.median),
            "p25": _keep_finite(low),
            "p75": _keep_finite(high),
            "rounds": rounds,
        }


def _keep_finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class CudaClock:
    """Tells the time on the GPU in seconds, by events: what `torch.utils.benchmark.Timer` asks twice."""

    def __init__(self) -> None:
        self._start = self._record()

    def __call__(self) -> float:
        event = self._record()
        event.synchronize()
        return self._start.elapsed_time(event) / MILLISECONDS

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class PartClock:
    """Runs only while one part of a step does, for a step that must undo what it did."""

    def __init__(self, device: str) -> None:
        self._elapsed = 0.0
        self._wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self) -> float:
        return self._elapsed

    @contextmanager
    def run(self) -> Iterator[None]:
        """Lets it run while the block does."""
        self._wait()
        start = timeit.default_timer()
        yield
        self._wait()
        self._elapsed += timeit.default_timer() - start


def make_clock(device: str) -> Clock:
    """Returns the clock of a device."""
    return CudaClock() if device == "cuda" else timeit.default_timer


def time_step(open_step: Open, threads: int, device: str, calls: int, clock: Clock | None = None) -> float:
    """Times a function `calls` times, after a warm-up, and returns the milliseconds of one call."""
    with open_step() as step, set_torch_threads(threads):
        for _ in range(WARMUP_STEPS):
            step()
        clock = clock or make_clock(device)
        timer = Timer("step()", globals={"step": step}, num_threads=threads, timer=clock)
        return timer.timeit(calls).mean * MILLISECONDS


def choose_calls(open_step: Open, threads: int, device: str, seconds: float) -> int:
    """Returns how many calls take about so many seconds, two at least.

    Seconds of the device's own clock: one that sees only a part of a step would choose far too many.
    """
    once = time_step(open_step, threads, device, 2) / MILLISECONDS
    return max(2, round(seconds / max(once, 1e-7)))


def run_rounds(
    contenders: Mapping[str, Open],
    *,
    threads: int,
    device: str,
    rounds: int,
    seconds: float,
    clock: Clock | None = None,
) -> dict[str, Series]:
    """Times contenders in turn, `rounds` times, each about `seconds` at a time; in milliseconds a call.

    Each round has an order of its own, so that none always follows the same one; the orders are those
    of each run. What disturbs the machine for longer than a round disturbs all contenders. `clock`
    replaces the device's own.
    """
    calls = {name: choose_calls(it, threads, device, seconds) for name, it in contenders.items()}
    orders = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name in orders.sample(list(contenders), len(contenders)):
            times[name].append(time_step(contenders[name], threads, device, calls[name], clock))
    return {name: Series(tuple(values)) for name, values in times.items()}

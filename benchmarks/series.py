"""Interleaved rounds: each contender is timed once a round, and ratios compare times of one round."""

from __future__ import annotations

import math
import random
import statistics
import timeit
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.benchmark.utils.common import set_torch_threads

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

Step = Callable[[], None]
Open = Callable[[], AbstractContextManager[Step]]
Clock = Callable[[], float]

WARMUP_STEPS = 4
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
        """The ratios, round by round; where the other is zero infinite, and 1 where both are."""
        pairs = zip(self.values, other.values, strict=True)
        return Series(tuple(a / b if b else math.inf if a else 1.0 for a, b in pairs))

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


@dataclass(frozen=True, slots=True)
class Turn:
    """What one call took, as the mean of a turn."""

    milliseconds: float
    faults: float  # minor page faults of the process; 0 where the system does not count them


def time_calls(step: Step, calls: int, clock: Clock) -> Turn:
    """Calls a function so often, garbage collection and all, as a training loop would."""
    faults, start = count_faults(), clock()
    for _ in range(calls):
        step()
    elapsed = clock() - start
    return Turn(elapsed / calls * MILLISECONDS, (count_faults() - faults) / calls)


def count_faults() -> int:
    """Returns how many pages this process waited for that were in memory, but not mapped."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def time_step(open_step: Open, threads: int, device: str, clock: Clock | None, calls: int) -> Turn:
    """Times a function `calls` times on a fresh model, after a warm-up."""
    with open_step() as step, set_torch_threads(threads):
        for _ in range(WARMUP_STEPS):
            step()
        return time_calls(step, calls, clock or make_clock(device))


def choose_calls(time: Callable[[int], Turn], seconds: float) -> int:
    """Returns how many calls take about so many seconds, two at least.

    Seconds of the device's own clock: one that sees only a part of a step would choose far too many.
    """
    once = time(2).milliseconds / MILLISECONDS
    return max(2, round(seconds / max(once, 1e-7)))


def interleave(timers: Mapping[str, Callable[[], Turn]], rounds: int) -> dict[str, list[Turn]]:
    """Lets each have its turn once a round, in an order that is drawn for the round: in each run the same."""
    orders = random.Random(0)
    turns: dict[str, list[Turn]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in orders.sample(list(timers), len(timers)):
            turns[name].append(timers[name]())
    return turns


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

    What disturbs the machine for longer than a round disturbs all contenders. `clock` replaces the
    device's own.
    """
    timers = {}
    for name, open_step in contenders.items():
        time = partial(time_step, open_step, threads, device, clock)
        # A clock that sees only a part of a step would choose far too many calls.
        calls = choose_calls(partial(time_step, open_step, threads, device, None), seconds)
        timers[name] = partial(time, calls)
    return {
        name: Series(tuple(turn.milliseconds for turn in it))
        for name, it in interleave(timers, rounds).items()
    }

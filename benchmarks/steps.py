"""How long a step takes: each workload in each mode, contenders side by side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.comparison import Comparison
from benchmarks.contender import open_step
from benchmarks.options import Options


def measure(options: Options) -> Iterator[Comparison]:
    """Yields the times and the page faults of each half type, number of threads, workload and mode."""
    for setting in options.settings:
        for workload in options.workloads:
            for mode in options.modes:
                contenders = {
                    name: partial(open_step, kind, workload, mode, setting)
                    for name, kind in options.choose(setting).items()
                }
                it = options.time_fresh(contenders, setting)
                what = workload.name, mode.name
                bases = ("autocast", "limit")
                yield Comparison("steps", *what, "ms", setting, it.milliseconds, bases, it.failures)
                yield Comparison("faults", *what, "a step", setting, it.faults, bases[:1])

"""How long a step takes: each workload in each mode, contenders side by side."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.comparison import Comparison
from benchmarks.contender import choose_runnable, open_step
from benchmarks.options import Options


def measure(options: Options) -> Iterator[Comparison]:
    """Yields a comparison for each half type, number of threads, workload and mode."""
    for setting in options.settings:
        for workload in options.workloads:
            for mode in options.modes:
                kinds, failures = choose_runnable(options.choose(setting), workload, mode, setting)
                contenders = {
                    name: partial(open_step, kind, workload, mode, setting) for name, kind in kinds.items()
                }
                series = options.time(contenders, setting)
                bases = ("autocast", "limit")
                yield Comparison("steps", workload.name, mode.name, "ms", setting, series, bases, failures)

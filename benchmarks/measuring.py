"""What it costs a training step to be measured, as `ampatch sweep` does, or to be watched for faults."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import ampatch as amp
from ampatch.sweeps.measure.meter import TrainingMeter
from benchmarks.comparison import Comparison
from benchmarks.contender import LEVELS, TRAIN, Kind, list_contenders, open_step
from benchmarks.options import Options
from benchmarks.series import Step
from benchmarks.setting import Setting
from benchmarks.workload import Workload

WAYS = ("alone", "measured", "diagnosed")


def measure(options: Options) -> Iterator[Comparison]:
    """Yields a comparison for each level of each half type, number of threads and workload."""
    for setting in options.settings:
        levels = [name for name in options.choose(setting) if name in LEVELS[setting.half]]
        for workload in options.workloads:
            for name in levels:
                kind = list_contenders(setting)[name]
                opened = (
                    partial(open_step, kind, workload, TRAIN, setting),
                    partial(open_measured, kind, workload, setting),
                    partial(open_diagnosed, kind, workload, setting),
                )
                it = options.time_fresh(dict(zip(WAYS, opened, strict=True)), setting)
                what = "measuring", workload.name, name
                yield Comparison(*what, "ms", setting, it.milliseconds, ("alone",), it.failures)


@contextmanager
def open_measured(kind: Kind, workload: Workload, setting: Setting) -> Iterator[Step]:
    """Yields a training step that a recorder watches, as in a sweep's child."""
    with amp.observe(TrainingMeter()), open_step(kind, workload, TRAIN, setting) as step:
        yield step


@contextmanager
def open_diagnosed(kind: Kind, workload: Workload, setting: Setting) -> Iterator[Step]:
    """Yields a training step of `initialize(..., diagnose=True)`."""
    with amp.override(diagnose=True), open_step(kind, workload, TRAIN, setting) as step:
        yield step

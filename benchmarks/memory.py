"""How much memory a step takes, and what for."""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.benchmark.utils.common import set_torch_threads

from benchmarks.allocation import count_bytes, make_meter, save_nothing
from benchmarks.comparison import Comparison
from benchmarks.contender import TRAIN, Kind, choose_runnable
from benchmarks.options import Options
from benchmarks.series import Series
from benchmarks.setting import Setting
from benchmarks.workload import Workload

MIB = 2**20
PEAK = "peak"
PARTS = (PEAK, "parameters", "masters", "casts", "optimizer state")


def measure(options: Options) -> Iterator[Comparison]:
    """Yields the MiB of each workload: at most in a step, and of what they are made up."""
    for setting in options.untimed_settings:
        for workload in options.workloads:
            with set_torch_threads(setting.threads):
                kinds, failures = choose_runnable(options.choose(setting), workload, TRAIN, setting)
                measured = {name: measure_parts(kind, workload, setting) for name, kind in kinds.items()}
            for part in PARTS:
                series = {name: Series((parts[part] / MIB,)) for name, parts in measured.items()}
                bases = ("autocast",) if part == PEAK else ()
                yield Comparison("memory", workload.name, part, "MiB", setting, series, bases, failures)


def measure_parts(kind: Kind, workload: Workload, setting: Setting) -> dict[str, int]:
    """Returns the bytes of each part."""
    with make_meter(setting.device) as meter:
        trainer = kind(workload, TRAIN, setting)
        with trainer.open():
            step = trainer.choose_step()
            step()  # makes the optimizer's state
            with meter.window():
                step()
            states = trainer.optimizer.state.values()
            parts = {
                "parameters": count_bytes(trainer.model.parameters()),
                "masters": count_bytes(trainer.list_masters()),
                "optimizer state": count_bytes(value for state in states for value in state.values()),
            }
    return {PEAK: meter.allocated.peak, "casts": measure_casts(kind, workload, setting), **parts}


def measure_casts(kind: Kind, workload: Workload, setting: Setting) -> int:
    """Returns the bytes that live after a first forward and not before, less the loss.

    No activation is kept. What `torch.autocast` caches lives as long as its context, which stays open.
    """
    with make_meter(setting.device) as meter:
        trainer = kind(workload, TRAIN, setting)
        with trainer.open(), trainer.keep_casts(), save_nothing():
            with meter.window():
                loss = trainer.compute_loss()
            expected = count_bytes([loss])
            del loss
    return meter.allocated.after - meter.allocated.before - expected

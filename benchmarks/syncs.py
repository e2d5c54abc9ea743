"""How often a step makes the host wait for the device, to read a value of a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark.utils.common import set_torch_threads

from benchmarks.comparison import Comparison
from benchmarks.contender import TRAIN, Kind, Trainer, choose_runnable
from benchmarks.options import Options
from benchmarks.series import Series, Step
from benchmarks.setting import Setting
from benchmarks.workload import Workload

PLAIN = "float32"
OPTIMIZERS = {"fused optimizer": True, "optimizer not fused": False}
WARMUP_STEPS = 3

# What reads values, as dispatched ops and, for those that dispatch none on a CPU, as functions.
READS = frozenset(
    {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select"}
)
READING_FUNCTIONS = frozenset({torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu})


def measure(options: Options) -> Iterator[Comparison]:
    """Yields the reads of one step that plain torch, in float32 with the same optimizer, does not do."""
    for setting in options.untimed_settings:
        for workload in options.workloads:
            for name, fused in OPTIMIZERS.items():
                with set_torch_threads(setting.threads):
                    series, failures = count_all(options, workload, setting, fused)
                yield Comparison("syncs", workload.name, name, "reads", setting, series, failures=failures)


def count_all(
    options: Options, workload: Workload, setting: Setting, fused: bool
) -> tuple[dict[str, Series], dict[str, str]]:
    """Returns the reads of each contender less those of float32, and why the others cannot run."""
    kinds, failures = choose_runnable(options.choose(setting), workload, TRAIN, setting, fused)
    if not kinds:
        return {}, failures
    plain = count_step(Trainer, workload, setting, fused)
    counts = {name: count_step(kind, workload, setting, fused) - plain for name, kind in kinds.items()}
    return {name: Series((float(count),)) for name, count in counts.items()}, failures


def count_step(kind: Kind, workload: Workload, setting: Setting, fused: bool) -> int:
    """Returns how often one step waits, after some that make what later ones keep."""
    trainer = kind(workload, TRAIN, setting, fused)
    with trainer.open():
        step = trainer.choose_step()
        for _ in range(WARMUP_STEPS):
            step()
        return make_counter(setting.device)(step)


def make_counter(device: str) -> Callable[[Step], int]:
    """Returns what counts the waits of a function on a device."""
    return count_warnings if device == "cuda" else count_reads


def count_reads(step: Step) -> int:
    """Counts the ops of a function that would wait, were its tensors on a GPU.

    >>> count_reads(lambda: torch.ones(1).item())
    1
    """
    with ExitStack() as stack:
        functions, ops = stack.enter_context(FunctionReads()), stack.enter_context(OpReads())
        step()
    return functions.count + ops.count


class OpReads(TorchDispatchMode):
    """Counts the ops that read values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Counts one op, and runs it."""
        self.count += func.overloadpacket.__name__ in READS  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


class FunctionReads(TorchFunctionMode):
    """Counts the functions that read values without an op."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        """Counts one function, and runs it."""
        self.count += func in READING_FUNCTIONS
        return func(*args, **(kwargs or {}))


def count_warnings(step: Step) -> int:
    """Counts the times that CUDA says it waited."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.synchronize()  # warm-up steps are over
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

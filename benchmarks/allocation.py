"""Counts the bytes of tensors that a part of a run allocates, as torch's own allocators report them."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile, record_function

WINDOW = "benchmarks: window"


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes allocated since a meter was opened: when its window begins, when it ends, and at most in it."""

    before: int
    after: int
    peak: int


class CpuMeter:
    """Reads the allocations of CPU memory from torch's profiler; they are there once it is closed.

    Memory that a library takes by itself, such as oneDNN for its scratchpads, is not seen.
    """

    def __init__(self) -> None:
        self.allocated = Allocated(0, 0, 0)
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)

    def __enter__(self) -> CpuMeter:
        gc.collect()  # what is freed inside must have been allocated inside
        self._profile.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._profile.__exit__(kind, error, traceback)
        if kind is None:
            self.allocated = self._read()

    @contextmanager
    def window(self) -> Iterator[None]:
        """The part of the run to look at; there is one."""
        gc.collect()
        with record_function(WINDOW):
            yield

    def _read(self) -> Allocated:
        events = list(_walk(self._profile.profiler.kineto_results.experimental_event_tree()))
        (window,) = (event for event in events if event.name == WINDOW)
        changes = sorted(
            (event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.total_allocated)
            for event in events
            if event.tag == torch._C._profiler._EventType.Allocation
        )
        # The total counts what earlier profiles saw and is still there.
        base = changes[0][2] - changes[0][1] if changes else 0
        before = [total - base for time, _, total in changes if time < window.start_time_ns]
        during = [
            total - base for time, _, total in changes if window.start_time_ns <= time <= window.end_time_ns
        ]
        totals = [(before or [0])[-1], *during]
        return Allocated(totals[0], totals[-1], max(totals))


def _walk(events: Iterable[torch._C._profiler._ProfilerEvent]) -> Iterator[torch._C._profiler._ProfilerEvent]:
    for event in events:
        yield event
        yield from _walk(event.children)


class CudaMeter:
    """Asks the allocator of the current GPU."""

    def __init__(self) -> None:
        self.allocated = Allocated(0, 0, 0)
        self._base = 0

    def __enter__(self) -> CudaMeter:
        multiply()
        gc.collect()
        self._base = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is to be closed."""

    @contextmanager
    def window(self) -> Iterator[None]:
        """The part of the run to look at; there is one."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield
        now = (before, torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated())
        self.allocated = Allocated(*(total - self._base for total in now))


def multiply() -> None:
    """Has cuBLAS allocate what it keeps for each thread, or the first product would pay for it.

    A backward runs on a thread of its own.
    """
    layer = torch.nn.Linear(16, 16, device="cuda")
    layer(torch.ones(16, 16, device="cuda", requires_grad=True)).sum().backward()
    torch.cuda.synchronize()


def make_meter(device: str) -> CpuMeter | CudaMeter:
    """Returns the meter of a device."""
    return CudaMeter() if device == "cuda" else CpuMeter()


def count_bytes(values: Iterable[object]) -> int:
    """Adds up the bytes of the tensors among some values."""
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def save_nothing() -> saved_tensors_hooks:
    """A block whose graphs keep no tensor for a backward, so that none can run."""

    def refuse(_: object) -> Tensor:
        raise AssertionError("no tensor was kept for a backward")

    return saved_tensors_hooks(lambda tensor: None, refuse)

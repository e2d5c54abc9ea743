"""What time is taken by: the host's clock, or marks in the GPU's own queue."""

from __future__ import annotations

import time

import torch

Mark = object  # a point in time, which only its clock can read


class HostClock:
    """The clock of a CPU, where an operation is over when it returns; marks are seconds."""

    def __init__(self) -> None:
        self.mark = time.perf_counter  # a call less than a method

    def is_over(self, mark: Mark) -> bool:
        """Whether the device has come to a mark: always."""
        return True

    def milliseconds(self, start: Mark, end: Mark) -> float:
        """Returns the time between two marks that are over."""
        return (end - start) * 1000

    def synchronize(self) -> None:
        """Has nothing to wait for."""


class DeviceClock(HostClock):
    """Marks are CUDA events in the current stream: they cost the loop no host sync."""

    def __init__(self) -> None:
        self.mark = self._record

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has come to the event."""
        return mark.query()

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Returns the time between two events, as the device took it."""
        return start.elapsed_time(end)

    def synchronize(self) -> None:
        """Waits for the device."""
        torch.cuda.synchronize()

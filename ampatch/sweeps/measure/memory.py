"""How much memory this process needed at its highest."""

import sys
from pathlib import Path

import torch

MIB = 2**20


def peak_memory() -> tuple[str, float | None]:
    """Returns ("device", MiB) if tensors were on a GPU, else ("resident", MiB)."""
    device = peak_device_mib()
    return ("device", device) if device else ("resident", peak_resident_mib())


def peak_device_mib() -> float:
    """Returns the peak of what torch allocated, summed over the GPUs; 0 where it used none."""
    if not torch.cuda.is_initialized():
        return 0.0
    devices = range(torch.cuda.device_count())
    return sum(torch.cuda.max_memory_allocated(device) for device in devices) / MIB


def peak_resident_mib() -> float | None:
    """Returns the peak resident memory of the process, interpreter included; None on Windows.

    On Linux from /proc: there `ru_maxrss` of a process is never below what its parent had when
    it started it, so a sweep started by a large process would measure that one.
    """
    status = Path("/proc/self/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) / 1024
    if sys.platform == "win32":
        return None
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (MIB if sys.platform == "darwin" else 1024)


def reset_peak() -> None:
    """Begins to look for a new peak, where the system can: in a process that measures several runs."""
    if torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not on Linux, or not allowed
        return

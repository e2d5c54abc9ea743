"""How much memory this process needed at its highest, and how much the tensors take that training keeps."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module, Parameter

import ampatch as amp
from ampatch.tools.tensors import tensors_in

MIB = 2**20
SAMPLES = 32


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
        sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(sizes["VmHWM"].split()[0]) / 1024
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


# ---- Tensors ----


def kept_mib(models: Iterable[Module], optimizers: Iterable[object], casts: int) -> float:
    """Returns the MiB of the tensors that training keeps, each once, and of so many bytes of casts."""
    optimizers = list(optimizers)
    params = [param for model in models for param in model.parameters()]
    masters = [master for optimizer in optimizers for _, master in amp.master_pairs(optimizer)]
    grads = [param.grad for param in (*params, *masters) if param.grad is not None]
    states = [tensor for it in optimizers for tensor in tensors_in(getattr(it, "state", {}))]
    kept = {id(tensor): tensor for tensor in (*params, *masters, *grads, *states)}
    return (nbytes_of(kept.values()) + casts) / MIB


def sample_weights(models: Iterable[Module]) -> tuple[float, ...]:
    """Returns the middle element of parameters, evenly chosen: enough to tell weights from others."""
    params = [param for model in models for param in model.parameters() if type(param) is Parameter]
    chosen = [param for param in params if param.numel() and not param.is_meta]
    chosen = chosen[:: len(chosen) // SAMPLES + 1]
    return tuple(param.detach().flatten()[param.numel() // 2].item() for param in chosen)


def nbytes_of(tensors: Iterable[Tensor]) -> int:
    """Adds up the bytes of tensors; of sparse ones, those of their values and indices."""
    parts = [(it._values(), it._indices()) if it.is_sparse else (it,) for it in tensors]
    return sum(part.nbytes for own in parts for part in own)

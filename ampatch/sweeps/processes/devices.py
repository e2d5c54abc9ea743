"""What runs are put on that go side by side: a GPU each, or a part of the processors."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ampatch.sweeps.environment import find_cpus
from ampatch.sweeps.faults import ArgumentError

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Device:
    """What a run sees alone: a GPU, as the environment calls it, or these processors."""

    name: str
    visible: str | None = None
    cpus: tuple[int, ...] = ()


def parse_devices(text: str) -> tuple[Device, ...]:
    """Reads the numbers of GPUs, which count as torch does: within those that are visible to this process."""
    listed, most = os.environ.get(VISIBLE), torch.cuda.device_count()
    if not most:
        raise ArgumentError([("devices", text, "torch finds no GPU; --jobs N shares the processors out")])
    known = [it.strip() for it in listed.split(",") if it.strip()] if listed is not None else None
    words = [word.strip() for word in text.split(",")]
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(set(numbers)) < len(words) or max(numbers) >= most:
        expected = (
            f"expected numbers of the {most} GPUs that there are, from 0, separated by commas, each once"
        )
        raise ArgumentError([("devices", text, expected)])
    return tuple(Device(str(it), known[it] if known else str(it)) for it in numbers)


def share_out(jobs: int, *, on_cpu: bool) -> tuple[Device, ...]:
    """Returns so many GPUs, or where there is none so many parts of the processors; none for one job."""
    gpus, cpus = 0 if on_cpu else torch.cuda.device_count(), sorted(find_cpus())
    most = gpus or len(cpus)
    if not 1 <= jobs <= most:
        what = "GPUs" if gpus else "processors"
        raise ArgumentError([("jobs", jobs, f"expected 1 to {most}, the {what} that there are")])
    if jobs == 1:
        return ()
    if gpus:
        return parse_devices(",".join(map(str, range(jobs))))
    size = len(cpus) // jobs
    parts = [tuple(cpus[start * size : (start + 1) * size]) for start in range(jobs)]
    can_pin = hasattr(os, "sched_setaffinity")  # Linux; elsewhere the system shares them out
    return tuple(Device(f"cpu {','.join(map(str, it))}", cpus=it if can_pin else ()) for it in parts)

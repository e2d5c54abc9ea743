"""What a benchmark runs on: device, half type, number of threads; and the machine in words."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch

import ampatch as amp


@dataclass(frozen=True, slots=True)
class Setting:
    """One device, one half type, one number of threads."""

    device: str
    half: torch.dtype
    threads: int

    @property
    def half_name(self) -> str:
        """The half type as users write it."""
        return str(self.half).removeprefix("torch.")

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients of this half type underflow without a loss scale."""
        return self.half is torch.float16

    def describe(self) -> dict[str, object]:
        """The setting as a result holds it."""
        return {"device": self.device, "half": self.half_name, "threads": self.threads}


def describe_machine() -> dict[str, object]:
    """Returns what a reader needs to judge a number: machine, versions, commit and time."""
    return {
        "processor": _read_processor(),
        "cores": os.cpu_count(),
        "usable_cores": count_usable_cores(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ampatch": amp.__version__,
        "commit": _read_commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def count_usable_cores() -> int:
    """Returns how many cores this process may run on, as `taskset` says."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _read_commit() -> str | None:
    """The commit of the source, with a `+` where files differ; None outside of a clone, or without git."""
    root = Path(__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None

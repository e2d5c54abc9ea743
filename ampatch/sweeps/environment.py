"""Where a sweep runs: versions, machine, command and commit, for the reader of its files."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from ampatch import __version__
from ampatch.apex.script import Script
from ampatch.sweeps.records.record import RunRecord
from ampatch.sweeps.records.sweep import Environment

GIT_SECONDS = 10
MOST_IDLE = 0.25  # part of the processors' time; where more is left, others take nothing from a run
IDLE = slice(3, 5)  # idle and iowait, of the times in /proc/stat


def collect(script: Script) -> Environment:
    """Looks around; what cannot be found out is left out, and nothing raises."""
    return Environment(
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command_as_typed(),
        commit=find_commit(find_folder(script)),
        device="cpu",
        **describe_machine(),
    )


def describe_machine() -> dict[str, object]:
    """Returns the versions and the processor of this process: fields of an `Environment`."""
    return {
        "ampatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": find_cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }


def command_as_typed() -> str:
    """Returns the command line of this process; of a notebook, which nobody started by one, nothing.

    Texts of many lines, as `python -c` takes, are left out.
    """
    if "ipykernel" in sys.modules:
        return ""
    first, *words = sys.orig_argv or ["python"]
    if words and Path(words[0]).stem == "ampatch":  # the script that pip made
        first, *words = words
    name = Path(first).stem if os.name == "nt" else Path(first).name
    return shlex.join([name, *("..." if "\n" in word else word for word in words)])


def with_device(environment: Environment, records: Iterable[RunRecord]) -> Environment:
    """Adds the device that the runs were on: asked for here, a GPU would lose memory to this process."""
    devices = [record.measured.device for record in records if record.measured]
    return replace(environment, device=next((name for name in devices if name != "cpu"), "cpu"))


def find_folder(script: Script) -> Path:
    """Returns the folder that a script is in; of a module, the working directory."""
    path = Path(script.name)
    if script.is_module or not path.exists():
        return Path()
    return path if path.is_dir() else path.parent


def find_commit(folder: Path) -> str | None:
    """Returns the commit of the repository that a folder is in, with "+" if files of it have changed.

    None where git fails or is missing.
    """
    options = ("--always", "--abbrev=64", "--dirty=+", "--exclude=*")  # the whole hash, whatever its tags
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", *options],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",  # it names folders, whose names need not be text
            timeout=GIT_SECONDS,
            check=True,
            # Reading must not get into the way of a git that works there.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


class Load:
    """The part of the processors that other programs take from now on; known on Linux alone."""

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._before = read_times(path)
        self._own = own_ticks()

    def share(self) -> float | None:
        """Returns the part of the processors' time that others took, 0 where enough was left for us.

        Ours are this process and its children that have ended.
        """
        passed = [new - old for new, old in zip(read_times(self._path), self._before, strict=True)]
        if not sum(passed):
            return None
        idle = sum(passed[IDLE]) / sum(passed)
        own = (own_ticks() - self._own) / sum(passed)
        return max(0.0, 1 - idle - own) if idle < MOST_IDLE else 0.0


def read_times(path: Path) -> list[int]:
    """Returns what the processors have spent their time on, in ticks: the eight kinds that Linux counts."""
    try:
        return [int(word) for word in path.read_text().split()[1:9]]
    except (OSError, ValueError):
        return []


def own_ticks() -> float:
    """Returns the processors' time of this process and of its children that have ended, in ticks."""
    return sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.0


def find_cpu(path: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the name of the CPU, as Linux knows it or else as Python does."""
    try:
        lines = [line.partition(":") for line in path.read_text(errors="replace").splitlines()]
    except OSError:
        lines = []
    names = [value.strip() for name, _, value in lines if name.strip() in ("model name", "Model", "cpu")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")

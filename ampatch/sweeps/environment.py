"""Where a sweep runs: versions, machine, command and commit, for the reader of its files."""

from __future__ import annotations

import multiprocessing
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch

from ampatch import __version__
from ampatch.apex.script import Script
from ampatch.sweeps.records.record import RunRecord
from ampatch.sweeps.records.sweep import Environment

GIT_SECONDS = 10
CPUS = Path("/proc/cpuinfo")
HALF_FLAGS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "asimdhp", "bf16")
MOST_IDLE = 0.25  # part of the processors' time; where more is left, others take nothing from a run
LEAST_TICKS = 10
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
        "cores": len(find_cpus()),
        "threads": torch.get_num_threads(),
        "half": find_half_flags(),
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
    """What other programs take from now on of the processors that this one may use; known on Linux alone."""

    def __init__(self, path: Path = Path("/proc/stat")) -> None:
        self._path = path
        self._cpus = {f"cpu{number}" for number in find_cpus()}
        self._before = read_times(path, self._cpus)
        self._own = own_ticks()

    def taken(self) -> tuple[float, float] | None:
        """Returns the seconds that others took, and the part of all time, 0 where enough was left for us.

        Ours are this process, its children that have ended, and those that `multiprocessing` started. None
        where that is not known, or too little time has passed to tell.
        """
        now = read_times(self._path, self._cpus)
        passed = [new - old for new, old in zip(now, self._before, strict=True)]
        if sum(passed) < LEAST_TICKS:
            return None
        idle = sum(passed[IDLE])
        others = max(0.0, sum(passed) - idle - (own_ticks() - self._own))
        is_free = idle >= MOST_IDLE * sum(passed)
        return others / os.sysconf("SC_CLK_TCK"), 0.0 if is_free else others / sum(passed)


def find_cpus() -> set[int]:
    """Returns the processors that the threads of this process may use: OMP_PROC_BIND gives each its own."""
    if not hasattr(os, "sched_getaffinity"):
        return set(range(os.cpu_count() or 1))
    found = set(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it may have ended
            found |= os.sched_getaffinity(int(thread.name))
    return found


def read_times(path: Path, cpus: Collection[str]) -> list[int]:
    """Returns what these processors have spent their time on, in ticks: the eight kinds that Linux counts.

    Of all processors where none has one of the names, as in containers that number theirs themselves.
    """
    lines = [line.split() for line in read_text(path).splitlines() if line.startswith("cpu")]
    lines = [words for words in lines if words[0] in cpus] or lines[:1]
    return [sum(map(int, kind)) for kind in zip(*(words[1:9] for words in lines), strict=True)]


def own_ticks() -> float:
    """Returns the processors' time of this process and of its children, in ticks."""
    if not hasattr(os, "sysconf"):
        return 0.0
    found = sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")
    for child in multiprocessing.active_children():
        words = read_text(Path(f"/proc/{child.pid}/stat")).rpartition(")")[2].split()
        found += sum(map(int, words[11:15]))
    return found


def find_half_flags(path: Path = CPUS) -> str | None:
    """Returns the instructions for half types that Linux says the CPU has, None elsewhere."""
    words = set(read_text(path).split())
    return ", ".join(flag for flag in HALF_FLAGS if flag in words) if words else None


def find_cpu(path: Path = CPUS) -> str:
    """Returns the name of the CPU, as Linux knows it or else as Python does."""
    lines = [line.partition(":") for line in read_text(path).splitlines()]
    names = [value.strip() for name, _, value in lines if name.strip() in ("model name", "Model", "cpu")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")


def read_text(path: Path) -> str:
    """Returns what is in a file, nothing where there is none."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

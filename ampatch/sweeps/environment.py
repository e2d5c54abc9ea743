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
from ampatch.sweeps.measure.load import find_cpus, read_text
from ampatch.sweeps.rows import Environment, Run
from ampatch.sweeps.switches import find_file

GIT_SECONDS = 10
CPUS = Path("/proc/cpuinfo")
HALF_FLAGS = ("avx512_bf16", "amx_bf16", "avx512_fp16", "amx_fp16", "asimdhp", "bf16")


def collect(script: Script) -> Environment:
    """Looks around; what cannot be found out is left out, and nothing raises."""
    folder = find_file(script).parent
    return Environment(
        created=datetime.now().astimezone().isoformat(timespec="seconds"),
        command=command_as_typed(),
        commit=find_commit(folder if folder.is_dir() else Path()),
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


def with_device(environment: Environment, runs: Iterable[Run]) -> Environment:
    """Adds the device that the runs were on: asked for here, a GPU would lose memory to this process."""
    return replace(environment, device=next((run.device for run in runs if run.device != "cpu"), "cpu"))


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


def find_half_flags(path: Path = CPUS) -> str | None:
    """Returns the instructions for half types that Linux says the CPU has, None elsewhere."""
    words = set(read_text(path).split())
    return ", ".join(flag for flag in HALF_FLAGS if flag in words) if words else None


def find_cpu(path: Path = CPUS) -> str:
    """Returns the name of the CPU, as Linux knows it or else as Python does."""
    lines = [line.partition(":") for line in read_text(path).splitlines()]
    names = [value.strip() for name, _, value in lines if name.strip() in ("model name", "Model", "cpu")]
    return next(filter(None, [*names, platform.processor(), platform.machine()]), "unknown")

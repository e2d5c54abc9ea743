"""Runs the scripts of examples/legacy as their users would: `ampatch run`, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "legacy"

# torch 2.13, gloo: a process that ends right after its last collective may abort with these words, with
# or without ampatch. A thread of gloo's waits for the interpreter's lock to release the last result, and
# the interpreter is gone. Such a run says nothing about the script, and is done again.
GLOO_ABORT = "terminate called without an active exception"
TRIES = 4


def ampatch_run(name, *arguments, folder, level=None, processes=None):
    """Returns what `ampatch run [--opt-level LEVEL] NAME.py ARGUMENTS...` prints; warnings are errors."""
    launcher = [sys.executable]
    if processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = ["--opt-level", level] if level else []
    command = [*launcher, "-m", "ampatch", "run", *options, FOLDER / f"{name}.py", *map(str, arguments)]
    # One thread: the scripts' matrices are so small that two would wait for each other.
    # PYTHONWARNINGS reaches what torchrun starts, as `-W error` would not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    for _ in range(TRIES if processes else 1):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode == 0 or GLOO_ABORT not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def numbers(pattern, printed):
    """Returns the numbers in the groups of a pattern that must be there; the last match counts."""
    found = [*re.finditer(pattern, printed)]
    assert found, f"{pattern!r} is not in:\n{printed}"
    return [float(group) for group in found[-1].groups()]


def selected_level(printed):
    """Returns the level that the banner names."""
    found = re.search(r"Selected optimization level (O\d)", printed)
    assert found, f"no banner in:\n{printed}"
    return found.group(1)

"""Runs the scripts of examples/legacy as their users would: `ampatch run`, in processes of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "examples" / "legacy"


def ampatch_run(name, *arguments, folder, level=None, processes=None, override=()):
    """Returns what `ampatch run [--opt-level LEVEL] NAME.py ARGUMENTS...` prints; warnings are errors."""
    launcher = [sys.executable]
    if processes is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    options = [*(["--opt-level", level] if level else []), *override]
    command = [*launcher, "-m", "ampatch", "run", *options, FOLDER / f"{name}.py", *map(str, arguments)]
    # One thread: the scripts' matrices are so small that two would wait for each other. The variable
    # reaches what torchrun starts, as `-W error` would not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
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

"""Runs the scripts of examples/legacy as their users would: `ampatch run`, or the same in a fork."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from pathlib import Path

from ampatch.__main__ import main
from faults import import_for_forks, run_forked

FOLDER = Path(__file__).parents[1] / "examples" / "legacy"

# torch 2.13, gloo: a process that ends right after its last collective may abort with these words, with
# or without ampatch. A thread of gloo's waits for the interpreter's lock to release the last result, and
# the interpreter is gone. Such a run says nothing about the script, and is done again.
GLOO_ABORT = "terminate called without an active exception"
TRIES = 4
LIMIT = 200  # seconds until a fork counts as hanging


def ampatch_run(name, *arguments, folder, level=None, processes=None, is_fork=True):
    """Returns what `ampatch run [--opt-level LEVEL] NAME.py ARGUMENTS...` prints; warnings are errors.

    A fork of this process has torch already; `is_fork=False` starts Python, by torchrun for several.
    """
    options = ["--opt-level", level] if level else []
    command = ["run", *options, str(FOLDER / f"{name}.py"), *map(str, arguments)]
    return (run_in_forks if is_fork else run_in_processes)(command, folder, processes)


def run_in_processes(command, folder, count):
    launcher = [sys.executable]
    if count is not None:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command = [*launcher, "-m", "ampatch", *command]
    # One thread: the scripts' matrices are so small that two would wait for each other.
    # PYTHONWARNINGS reaches what torchrun starts, as `-W error` would not.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    for _ in range(TRIES if count else 1):
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode == 0 or GLOO_ABORT not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_in_forks(command, folder, count):
    return print_in_forks(lambda: main(command), ["ampatch", *command], folder, count)


def print_in_forks(function, argv, folder, count=None):
    """Returns what a function prints, which reads `argv`, in a fork or in so many ranks."""
    import_for_forks()
    said = [folder / f"said{rank}.txt" for rank in range(count or 1)]
    children, port = [], find_port()
    for rank, file in enumerate(said):
        ranks = torchrun_variables(rank, count, port) if count else {}
        child = os.fork()
        if child == 0:
            run_forked(lambda ranks=ranks: run_here(function, argv, folder, ranks), file)
        children.append(child)
    statuses = list(map(wait_for, children))
    printed = "".join(file.read_text() for file in said)
    assert not any(statuses), f"{statuses}\n{printed}"
    return printed


def wait_for(child):
    """Returns the exit status of a fork; one that hangs is killed."""
    timer = threading.Timer(LIMIT, os.kill, (child, signal.SIGKILL))
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    return status


def torchrun_variables(rank, count, port):
    """Returns what torchrun tells a rank."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {name: str(value) for name, value in ranks.items()} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def find_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def run_here(function, argv, folder, variables):
    """Calls a function as if this process had been started in a folder, with warnings as errors."""
    os.environ.update(variables)
    os.chdir(folder)
    warnings.simplefilter("error")
    sys.argv = list(map(str, argv))
    # pytest has a sys.stdout that is not file 1.
    with (
        open(1, "w", closefd=False) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        sys.exit(function())


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

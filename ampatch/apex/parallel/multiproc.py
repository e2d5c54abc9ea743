"""`python -m apex.parallel.multiproc train.py ARGS`: one process for each GPU, as apex started them.

Each gets `--world-size` and `--rank` at the end of its arguments, and RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment. What ranks above 0 print goes to
GPU_1.log and so on. The number of processes is what `--nproc_per_node` before the script says, else
`--world-size` among its arguments, WORLD_SIZE in the environment, the number of GPUs, and one without
any. If a process fails, the others are ended, and its status is ours.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import torch

USAGE = "usage: python -m apex.parallel.multiproc [--nproc_per_node N] SCRIPT [ARGS...]"
PROCESSES = ("--nproc_per_node", "--nproc-per-node")
NAME = "apex.parallel.multiproc"


def main() -> int:
    """Starts the processes, waits for them and returns the exit status."""
    processes, script = split_arguments(sys.argv[1:])
    if not script:
        sys.exit(USAGE)
    command = child_command(sys.orig_argv)
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **os.environ}
    workers: list[subprocess.Popen] = []
    with ExitStack() as stack:
        stack.callback(end, workers)
        for rank in range(processes):
            log = None if rank == 0 else stack.enter_context(open(f"GPU_{rank}.log", "w"))
            # At the end they count: argparse takes the last.
            arguments = [*script, "--world-size", str(processes), "--rank", str(rank)]
            ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
            place = ranks | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
            workers.append(subprocess.Popen([*command, *arguments], stdout=log, env=environment | place))
        return wait(workers)


def split_arguments(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Returns the number of processes, and the script with its arguments.

    >>> split_arguments(["--nproc_per_node", "3", "train.py", "-b", "64"])
    (3, ['train.py', '-b', '64'])
    >>> split_arguments(["train.py", "--world-size=2"])
    (2, ['train.py', '--world-size=2'])
    """
    name, _, value = arguments[0].partition("=") if arguments else ("", "", "")
    if name in PROCESSES:
        value, script = (value, arguments[1:]) if value else (arguments[1], arguments[2:])
        return int(value), list(script)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--world-size", default=os.environ.get("WORLD_SIZE"))
    asked_for = parser.parse_known_args(arguments)[0].world_size
    return int(asked_for or torch.cuda.device_count() or 1), list(arguments)


def child_command(own: Sequence[str]) -> list[str]:
    """Returns what is to precede the script: this process was started by it too, with its options.

    >>> child_command(["python", "-u", "-m", "ampatch", "run", "-m", "apex.parallel.multiproc", "a.py"])[1:]
    ['-u', '-m', 'ampatch', 'run']
    >>> child_command(["python", "-m", "ampatch.apex.parallel.multiproc", "a.py"])[1:]
    ['-m', 'ampatch', 'run']
    """
    before = [place for place, word in enumerate(own) if word in (NAME, f"-m{NAME}")]
    if not before:
        return [sys.executable, "-m", "ampatch", "run"]
    options = list(own[1 : before[0]])
    return [sys.executable, *(options[:-1] if options[-1:] == ["-m"] else options)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait(workers: Sequence[subprocess.Popen]) -> int:
    """Waits until all have succeeded, or one has failed; returns 0 or its exit status."""
    while True:
        codes = [worker.poll() for worker in workers]
        failed = [code for code in codes if code]
        if failed:
            return failed[0] if failed[0] > 0 else 128 - failed[0]
        if None not in codes:
            return 0
        time.sleep(0.05)


def end(workers: Sequence[subprocess.Popen]) -> None:
    """Ends the processes that still run: they would wait for the others for ever."""
    running = [worker for worker in workers if worker.poll() is None]
    for worker in running:
        worker.terminate()
    for worker in running:
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())

"""Runs code in processes of its own, quickly: torch and ampatch are imported once, and forked."""

import contextlib
import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SERVER = """
import atexit, gc, json, os, sys

def leave():
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)  # to take torch apart would take a second
    gc.unfreeze()  # what is out of sight counts as leaked, and triton 3.9 says so

_status = None
atexit.register(leave)  # before all others, to run after them
import torch._dynamo  # which each optimizer would import at its first step
import ampatch.apex, ampatch.__main__
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    exec(request["first"])
    child = os.fork()
    if not child:
        os.chdir(request["folder"])
        for number, name in (0, os.devnull), (1, "stdout"), (2, "stderr"):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        sys.path[0] = request["folder"]
        try:
            exec(compile(request["code"], "<code>", "exec"))
            sys.exit()
        except SystemExit as ended:
            _status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            raise
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
_status = 0
"""

# Has a sweep start its runs as forks of its own process, which has torch already.
RUNS_ARE_FORKS = """
import subprocess, traceback
from ampatch.sweeps import child
from ampatch.tools import process

class Fork(subprocess.Popen):
    def _execute_child(self, command, *options):
        read, _, _, out, _, error = options[9:15]
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            return
        os.setsid()
        os.chdir(options[4] or '.')
        for number, file in enumerate((read, out, error)):
            os.dup2(file, number)
        status = 1
        try:
            child.main(command[-1:])
            status = 0
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

process.subprocess = type("Forks", (), vars(subprocess) | {"Popen": Fork})
"""


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    status: int
    stdout: str
    stderr: str


class FreshProcesses:
    """Starts processes that have imported ampatch, and neither installed apex nor imported it."""

    def __init__(self, server: subprocess.Popen) -> None:
        self._server = server

    def run(self, code: str, folder: Path, first: str = "") -> Ended:
        """Runs code in a folder, which is the first entry of its sys.path.

        `first` is what the process imports that all are forked from, once for those that need it.
        """
        request = {"code": textwrap.dedent(code), "folder": str(folder), "first": first}
        print(json.dumps(request), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        return Ended(status, *((folder / name).read_text() for name in ("stdout", "stderr")))


def run_sweep(processes: FreshProcesses, folder: Path, *arguments: str) -> Ended:
    """Runs `ampatch sweep` in a process and a folder of its own, and its runs in forks of that."""
    code = f"import tempfile; tempfile.tempdir = os.getcwd()\n{RUNS_ARE_FORKS}"
    return processes.run(f"{code}sys.exit(ampatch.__main__.main({['sweep', *arguments]!r}))", folder)


@contextlib.contextmanager
def fresh_processes() -> Iterator[FreshProcesses]:
    """Starts the process that the others are forked from, and ends it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVER], text=True, **pipes) as server:
        yield FreshProcesses(server)
        server.stdin.close()

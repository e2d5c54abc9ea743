"""Starts a module of ours as a process of its own, which ends with its parent: `start.py HELD MODULE ARGS`.

HELD is the file that the parent holds locked (see `folder`). The path is that of `python script.py`: neither
the folder of this file nor that of the shell comes first, whatever is called `statistics.py` there.
"""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module, util


def main() -> None:
    """Calls the function `main` of the module with the arguments."""
    _, held, module, *sys.argv[1:] = sys.argv
    # Python has put the folder of this file first; that of the script takes the place later.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = sys.path[1:2]
    end_with_parent(held)
    if util.find_spec("ampatch") is None:  # it was found where the parent alone looks
        sys.path.append(os.path.abspath(f"{__file__}/../../.."))
    import_module(module).main(sys.argv[1:])


def end_with_parent(held: str) -> None:
    """Has a process wait until the parent has unlocked a file, as the system does when it was killed.

    Then it kills the process group, and with it what was started there. It is in the group itself, and ends
    with it otherwise; it is no child of this process, which may wait for all of its own.
    """
    try:
        file = os.open(held, os.O_RDONLY)
    except OSError:  # nothing is locked on Windows, and on some file systems
        return
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os.close(file)
        return
    try:
        if not os.fork():
            kill_group_when_unlocked(file)
    finally:
        os._exit(0)


def kill_group_when_unlocked(file: int) -> None:
    """Waits, deaf to the signals that ask the group to end, and writing nowhere."""
    import fcntl

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    fcntl.flock(file, fcntl.LOCK_SH)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Calls a function in the child process of a sweep; its arguments are WHERE, LEVEL and SEED."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from operator import attrgetter
from types import SimpleNamespace

from ampatch import AmpError
from ampatch.sweeps.function import IN_CHILD
from ampatch.sweeps.processes.in_process import Train, call


def main(where: str, level: str, seed: str) -> None:
    """Finds the function as `function.describe` says, and calls it."""
    place = json.loads(where)
    sys.path[:] = place["path"]
    os.environ[IN_CHILD] = "1"
    try:
        train = find(place["file"], place["module"], place["name"])
    except AmpError as error:
        raise RuntimeError(str(error)) from None  # of the module: no level could matter
    del os.environ[IN_CHILD]
    call(train, level, int(seed))


def find(file: str | None, module: str, name: str) -> Train:
    """Imports the module, or runs the file without what it guards by `__name__`, and returns the function."""
    if file is None:
        return attrgetter(name)(importlib.import_module(module))
    return attrgetter(name)(SimpleNamespace(**runpy.run_path(file, run_name="__mp_main__")))


if __name__ == "__main__":
    main(*sys.argv[1:])

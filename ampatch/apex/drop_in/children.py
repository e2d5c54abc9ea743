"""Processes that multiprocessing starts anew: they are prepared before they import the script."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import ampatch

# The folder that ampatch was imported from: a child knows its parent's sys.path only later.
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(ampatch.__file__)))


def inherit(**overrides: object) -> None:
    """Installs apex in a child, with the overrides of its parent."""
    ampatch.apex.install(**overrides)


@dataclass(frozen=True, slots=True)
class Preparation:
    """Takes the place of `multiprocessing.spawn.get_preparation_data`, and adds what a child calls.

    The child unpickles the data, and only then prepares itself with them: it imports the script.
    """

    original: Callable[[str], dict[str, object]]
    arguments: Mapping[str, object]
    function: Callable[..., object] = inherit

    def __call__(self, name: str) -> dict[str, object]:
        """Returns what a child is told."""
        data = self.original(name)
        if name == "ignore":
            # What a fork server is told. Newer Pythons have it import the script, but it installs
            # nothing; each of its children does both.
            return {key: value for key, value in data.items() if key != "init_main_from_path"}
        # The working directory comes first until a child has its parent's path, and may hold a torch.py.
        path = f"import sys; sys.path[:] = {data.get('sys_path')!r} or sys.path"
        path += f"; {FOLDER!r} in sys.path or sys.path.append({FOLDER!r})"
        call = UnpickledCall(functools.partial(self.function, **self.arguments))
        return {
            "ampatch_path": UnpickledCall(functools.partial(exec, path)),
            **data,
            f"ampatch {len(data)}": call,
        }


@dataclass(frozen=True, slots=True)
class UnpickledCall:
    """Calls a function where it is unpickled."""

    function: Callable[[], object]

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return self.function, ()

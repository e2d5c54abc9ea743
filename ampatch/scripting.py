"""Lets torch.jit.script take patched functions for what they stand in for."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch.jit import _builtins


class ScriptNames:
    """Tells TorchScript what patched functions are: scripted code runs the originals, uncast.

    Torch itself scripts functions when they are first needed, those of forward-mode AD among them.
    TorchScript knows builtins by identity, and would read the source of anything else.
    """

    def __init__(self) -> None:
        # The table is made on first use, from torch's namespace as it is then: before any patch.
        self._table: dict[int, str] = _builtins._get_builtin_table()
        self._added: list[int] = []

    def add(self, wrapper: Callable[..., object], original: object) -> None:
        """Makes `wrapper` stand for `original` in scripted code."""
        name = self._table.get(id(original))
        if name is not None:
            self._table[id(wrapper)] = name
            self._added.append(id(wrapper))
        elif inspect.isfunction(original):
            # As torch.jit.script_if_tracing marks its wrappers.
            wrapper.__dict__.update(__script_if_tracing_wrapper=True, __original_fn=original)

    def close(self) -> None:
        """Takes it back."""
        while self._added:
            self._table.pop(self._added.pop(), None)

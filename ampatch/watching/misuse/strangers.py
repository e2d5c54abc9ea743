"""Optimizers that `initialize` never saw: nobody makes masters for them, or unscales their gradients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.watching.misuse.half_weights import HalfWatch
from ampatch.watching.misuse.unnamed import UnnamedWatch
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.members import Members

HALF = (
    "{} steps half parameters of an initialized model, and initialize never saw it: it has no masters, so "
    "small updates are lost: make the optimizer first, then call "
    "amp.initialize(model, optimizer)"
)


class StrangerWatch:
    """Looks at what strangers step; a hook before the step of every optimizer there is."""

    def __init__(self, warner: Warner, members: Members, half: HalfWatch, unnamed: UnnamedWatch) -> None:
        self._warner, self._members, self._half, self._unnamed = warner, members, half, unnamed
        self._is_open = False
        self._forget()

    def _forget(self) -> None:
        self._is_open = False
        self._seen: set[int] = set()  # optimizers that were looked at, by id, since the last call

    def open(self, undo: ExitStack) -> None:
        """Puts the hook there, unless it is; `undo` receives the way back."""
        self._seen.clear()
        if not self._is_open:
            self._is_open = True
            undo.callback(self._forget)
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def _check(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        key, unnamed = id(optimizer), self._unnamed
        if torch.compiler.is_dynamo_compiling():
            return
        if key in self._seen and not (unnamed.strangers and unnamed.knows(optimizer)):
            return
        amp = None if key in self._seen else self._members.find(optimizer)
        if amp is not None:  # its own hook comes later
            amp.masters.install_again()
        elif key not in self._seen and self._steps_half(optimizer):
            self._warner.warn("stranger", HALF.format(type(optimizer).__name__))
        else:
            self._unnamed.check_stranger(optimizer)
        self._seen.add(key)

    def _steps_half(self, optimizer: Optimizer) -> bool:
        half = self._half.find_half(wants_masters=True)
        return any(id(param) in half for group in optimizer.param_groups for param in group["params"])

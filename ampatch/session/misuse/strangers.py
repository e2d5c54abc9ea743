"""Optimizers that `initialize` never saw: nobody makes masters for them, or unscales their gradients."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.session.misuse.half_weights import HalfWatch
from ampatch.session.misuse.loss_scale import ScaleWatch
from ampatch.session.misuse.warner import Warner
from ampatch.steps.grads import are_any

if TYPE_CHECKING:
    from ampatch.session.members import Members

HALF = (
    "{} steps half parameters of an initialized model, and initialize never saw it: it has no masters, so "
    "small updates are lost, and gradients stay scaled: make the optimizer first, then call "
    "amp.initialize(model, optimizer)"
)
SCALED = (
    "{} steps gradients that are multiplied by the loss scale, and initialize never saw it: pass it to "
    "amp.initialize(models, optimizers), and name it in scale_loss(loss, optimizers)"
)


class StrangerWatch:
    """Looks at what strangers step; a hook before the step of every optimizer there is."""

    def __init__(self, warner: Warner, members: Members, half: HalfWatch, scale: ScaleWatch) -> None:
        self._warner, self._members, self._half, self._scale = warner, members, half, scale
        self._is_open = False
        self._forget()

    def _forget(self) -> None:
        self._is_open = False
        self._known: set[int] = set()  # optimizers that are no strangers, by id
        self._seen: dict[int, tuple[int, int]] = {}  # strangers, with the backwards up to their step

    def open(self, undo: ExitStack) -> None:
        """Puts the hook there, unless it is; `undo` receives the way back."""
        if not self._is_open:
            self._is_open = True
            undo.callback(self._forget)
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def _check(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        key = id(optimizer)
        if torch.compiler.is_dynamo_compiling() or key in self._known:
            return
        found = self._members.find(optimizer)
        if found is not None:  # its own hook comes later
            self._known.add(key)
            found[0].masters.install_again()
            return
        is_new, before = key not in self._seen, self._seen.get(key, (0, 0))
        self._seen[key] = self._scale.count_backwards()
        if is_new and self._steps_half(optimizer):
            self._warner.warn("stranger", HALF.format(type(optimizer).__name__))
        elif self._steps_scaled(optimizer, before):
            self._warner.warn("stranger", SCALED.format(type(optimizer).__name__))

    def _steps_half(self, optimizer: Optimizer) -> bool:
        half = self._half.find_half(wants_masters=True)
        return any(id(param) in half for group in optimizer.param_groups for param in group["params"])

    def _steps_scaled(self, optimizer: Optimizer, before: tuple[int, int]) -> bool:
        """Whether all backwards since its last step were scaled; one host sync, before a warning."""
        scaled, plain = self._scale.count_backwards()
        if scaled == before[0] or plain != before[1] or self._warner.has_said("stranger"):
            return False
        params = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        if self._scale.find_leaves().isdisjoint(map(id, params)):
            return False
        return bool(are_any(params)) and not self._scale.was_asked()

"""Optimizers that `initialize` never saw: nobody makes masters for them, or unscales their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ampatch.watching.misuse.half_weights import HalfWatch
from ampatch.watching.misuse.loss_scale import SeenGrads
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.members import Members
    from ampatch.steps.block import ScaledLoss

HALF = (
    "{} steps half parameters of an initialized model, and initialize never saw it: it has no masters, so "
    "small updates are lost: make the optimizer first, then call "
    "amp.initialize(model, optimizer)"
)
SCALED = (
    "{} steps gradients that are multiplied by the loss scale, and initialize never saw it: pass "
    "it to amp.initialize(models, optimizers), and name it in scale_loss(loss, optimizers)"
)


@dataclass(slots=True, eq=False)
class Stranger:
    """An optimizer that initialize never saw, and the gradients that blocks have left it, scaled."""

    find: ref[Optimizer]
    before: SeenGrads | None = None  # a block that is open
    scaled: list[tuple[Tensor, ref[Tensor]]] = field(default_factory=list)

    def begin_block(self, known: set[int]) -> None:
        """Notes what is there, but for parameters that are `known` to the session, by id."""
        params = [param for group in self.find().param_groups for param in group["params"]]  # type: ignore[union-attr]
        self.before = SeenGrads(param for param in params if id(param) not in known)

    def end_block(self) -> None:
        """Notes what the block has changed; keeps none of it alive."""
        changed, self.before = self.before.list_changed() if self.before else [], None
        self.scaled += [(param, ref(param.grad)) for param in changed if param.grad is not None]

    def steps_scaled(self) -> bool:
        """Whether any such gradient is still there, and is not zero; one host sync where one is there."""
        scaled, self.scaled = self.scaled, []
        left = [
            param.grad.detach()
            for param, find in scaled
            if (grad := param.grad) is not None and grad is find()
        ]
        return any(bool((grad.coalesce().values() if grad.is_sparse else grad).any()) for grad in left)


class StrangerWatch:
    """Looks at what strangers step; a hook before the step of every optimizer there is."""

    def __init__(self, warner: Warner, members: Members, half: HalfWatch) -> None:
        self._warner, self._members, self._half = warner, members, half
        self._forget()

    def _forget(self) -> None:
        self._is_open = False
        self._seen: set[int] = set()  # optimizers that were looked at, by id, since the last call
        self.strangers: dict[int, Stranger] = {}  # by the id of the optimizer

    def open(self, undo: ExitStack) -> None:
        """Puts the hook there, unless it is; `undo` receives the way back."""
        self._seen.clear()
        if not self._is_open:
            self._is_open = True
            undo.callback(self._forget)
            undo.callback(register_optimizer_step_pre_hook(self._check).remove)

    def _list(self) -> Iterator[Stranger]:
        self.strangers = {key: one for key, one in self.strangers.items() if one.find() is not None}
        yield from self.strangers.values()

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes the gradients of strangers before a block that scales."""
        amps = self._members.optimizers() if block.scale.capture is None else ()
        known = {id(param) for amp in amps for param in (*amp.params(), *amp.masters.model_params())}
        for stranger in self._list() if amps else ():
            stranger.begin_block(known)

    def end_block(self) -> None:
        """Notes those that it has made."""
        for stranger in self._list():
            stranger.end_block()

    def _check(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        key = id(optimizer)
        if torch.compiler.is_dynamo_compiling() or (key in self._seen and key not in self.strangers):
            return
        amp = None if key in self._seen else self._members.find(optimizer)
        if amp is not None:  # its own hook comes later
            amp.masters.install_again()
        elif key not in self._seen and self._steps_half(optimizer):
            self._warner.warn("stranger", HALF.format(type(optimizer).__name__))
        else:
            self._check_scaled(optimizer)
        self._seen.add(key)

    def _check_scaled(self, optimizer: Optimizer) -> None:
        stranger = self.strangers.get(id(optimizer))
        if stranger is None or stranger.find() is not optimizer:  # ids are used again
            self.strangers[id(optimizer)] = Stranger(ref(optimizer))
        elif not self._warner.has_said("stranger") and stranger.steps_scaled():
            self._warner.warn("stranger", SCALED.format(type(optimizer).__name__))

    def _steps_half(self, optimizer: Optimizer) -> bool:
        half = self._half.find_half(wants_masters=True)
        return any(id(param) in half for group in optimizer.param_groups for param in group["params"])

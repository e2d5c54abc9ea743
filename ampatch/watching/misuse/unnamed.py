"""Scaled gradients that no block unscales: of optimizers that it does not name, and of late backwards."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING

from torch import Tensor
from torch.optim import Optimizer

from ampatch.levels.stack import Line, find_line, is_running
from ampatch.steps.grads.unnamed import BeforeGrad, UnnamedGrads, are_any
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.steps.phase import Phase
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.members import Members
    from ampatch.steps.scaler import Scale

TEXTS = {
    "unnamed": "{} steps gradients of a block of scale_loss that does not name it (apex stepped them scaled; "
    "here the step unscales them, and drops what was added to others): name each optimizer that the loss is "
    "for, `scale_loss(loss, [first, second])`",
    "late": "backward() ran after its block of scale_loss had ended, where nothing unscales gradients (the "
    "step of {} had to): move backward() into the block, "
    "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`",
    "stranger": "{} steps gradients that are multiplied by the loss scale, and initialize never saw it: pass "
    "it to amp.initialize(models, optimizers), and name it in scale_loss(loss, optimizers)",
}


@dataclass(slots=True, eq=False)
class Stranger:
    """An optimizer that initialize never saw, and gradients that it must not step."""

    find: weakref.ref[Optimizer]
    unnamed: UnnamedGrads = field(default_factory=UnnamedGrads)


@dataclass(slots=True, frozen=True)
class Marked:
    """A scaled backward that runs: why nobody unscales it, its scale, and whose gradients it may change."""

    kind: str
    scale: Scale
    before: Sequence[tuple[AmpOptimizer | Stranger, list[BeforeGrad]]]


class UnnamedWatch:
    """Notes such gradients as a backward makes them, and warns of a step that uses them."""

    def __init__(self, warner: Warner, members: Members) -> None:
        self._warner, self._members = warner, members
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self.strangers: dict[int, Stranger] = {}  # by the id of the optimizer
        self._left: dict[int, tuple[str, Line]] = {}  # optimizers, by id, and what left them some
        self._judged: set[tuple[int, str]] = set()

    def begin(self, kind: str, scale: Scale, named: Sequence[AmpOptimizer]) -> Marked | None:
        """Looks at the gradients that a scaled backward may change, but for those of the `named`."""
        others = self._members.others(named)
        if not (others or self.strangers) or scale.capture is not None:
            return None
        unscaled = _ids(named)
        ours = self._members.optimizers(of_thread=get_ident())
        idle = [amp for amp in others if amp in ours and _is_idle(amp)]
        for amp in idle:
            amp.begin_backward()
            if kind == "late":
                amp.unnamed.begin_late(amp.stepped_params(), scale)
                amp.phase = Phase.UNNAMED
        before = [(amp, amp.unnamed.begin(_others(amp.stepped_params(), unscaled), scale)) for amp in idle]
        return Marked(kind, scale, [*before, *self._begin_strangers(_ids((*others, *named)), scale)])

    def _begin_strangers(self, known: set[int], scale: Scale) -> list[tuple[Stranger, list[BeforeGrad]]]:
        self.strangers = {key: one for key, one in self.strangers.items() if one.find() is not None}
        found = []
        for stranger in self.strangers.values():
            params = [param for group in stranger.find().param_groups for param in group["params"]]
            found.append((stranger, stranger.unnamed.begin(_others(params, known), scale)))
        return found

    def end(self, marked: Marked) -> None:
        """Notes what the backward has changed."""
        ours = self._members.optimizers(of_thread=get_ident())
        for one, before in marked.before:
            is_ours = isinstance(one, Stranger) or one in ours
            if isinstance(one, AmpOptimizer) and is_ours:
                one.end_backward()
            if not one.unnamed.end(before if is_ours else (), marked.scale):
                continue
            if isinstance(one, AmpOptimizer):
                one.phase = Phase.UNNAMED
            if (id(one), marked.kind) not in self._judged:
                self._left[id(one)] = marked.kind, find_line()

    def show(self, grads: Iterable[Tensor]) -> None:
        """Unscales such gradients that somebody is about to clip, outside of a block."""
        left = [amp for amp in self._members.optimizers() if amp.phase is Phase.UNNAMED]
        given = set(map(id, grads)) if left else ()
        for amp in left:
            if any(id(param.grad) in given for param in amp.unnamed.find()):
                amp.read_grads()

    # A step

    def check(self, amp: AmpOptimizer, used: Tensor | bool | None) -> None:
        """Warns of such gradients in a step, unless all of those `used` are zero; one host sync, once."""
        if used is None or id(amp) not in self._left:
            return
        kind, line = self._left.pop(id(amp))
        self._judged.add((id(amp), kind))
        amp.unnamed.looks = False
        if used:  # where a script has cleared them to zero, it is right
            self._warner.warn(kind, TEXTS[kind].format(type(amp.optimizer).__name__), line)

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether it is a stranger that was seen before."""
        found = self.strangers.get(id(optimizer))
        return found is not None and found.find() is optimizer  # ids are used again

    def check_stranger(self, optimizer: Optimizer) -> None:
        """Warns of an optimizer that initialize never saw if it steps some; knows it from now on."""
        if not self.knows(optimizer):
            self.strangers[id(optimizer)] = Stranger(weakref.ref(optimizer))
        left = self.strangers[id(optimizer)].unnamed.find()
        if left and not self._warner.has_said("stranger") and are_any(left):
            self._warner.warn("stranger", TEXTS["stranger"].format(type(optimizer).__name__))


def _ids(optimizers: Iterable[AmpOptimizer]) -> set[int]:
    return {id(param) for one in optimizers for param in one.stepped_params()}


def _is_idle(amp: AmpOptimizer) -> bool:
    """Whether no block or step of an optimizer is open."""
    step, phase = amp.masters.lock.step, amp.phase
    is_free = amp.block is None and phase in (Phase.UNSCALED, Phase.UNNAMED)
    return is_free and not (step and is_running(step))


def _others(params: Iterable[Tensor], known: set[int]) -> Iterator[Tensor]:
    return (param for param in params if id(param) not in known)

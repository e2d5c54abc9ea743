"""Watches how gradients meet the loss scale, and warns where they are used as they must not be."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, TypeGuard
from weakref import ref

import torch
from torch import Tensor

from ampatch.levels.private import graph_task
from ampatch.levels.stack import Line, find_line
from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.steps.phase import Phase
from ampatch.watching.misuse.unnamed import Marked, UnnamedWatch
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.members import Members
    from ampatch.steps.block import ScaledLoss
    from ampatch.steps.optimizer import AmpOptimizer
    from ampatch.steps.scaler import LossScaler, Scale

RIGHT = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
INSIDE = (
    "backward() in a block of scale_loss began at a loss that is not scaled, and its gradients were divided "
    f"by the loss scale: call backward() on what scale_loss yields, {RIGHT}"
)
OUTSIDE = (
    "backward() outside of scale_loss made the gradients of a step at a dynamic loss scale: small ones may "
    f"be lost, and an overflow is not skipped: write {RIGHT}"
)


@dataclass(slots=True, eq=False)
class OpenBlock:
    """A block of `scale_loss` that is open, and what went backward in it."""

    block: ScaledLoss
    thread: int = field(default_factory=threading.get_ident)
    was_scaled: bool = False  # whether the scaled loss was part of any backward
    unscaled: dict[int, Line] = field(default_factory=dict)  # optimizers that others gave gradients to


MANY = 8  # blocks that have ended, of which a backward may still begin at what they yielded
EndedBlock = tuple["ref[Tensor]", "Scale", bool]  # what it yielded, and whether that went backward in it

# Where to note an optimizer, by id, with a line, if a parameter has another gradient than this of a version.
SeenGrad = tuple[dict[int, Line], int, Line, Tensor, Tensor | None, int]


class ScaleWatch(SessionPatch):
    """Watches how gradients meet the loss scale, where that is no static 1.

    What a backward begins at shows whether its gradients are scaled: the scaled loss itself, as a rule, or
    something that was computed from it. No hook tells of it, so `torch.autograd.backward` is patched.
    Optimizers are known by id, so that none is kept alive. What is found is told at the step that would use
    it: a warning that is made an error then stops the step, with nothing half done.
    """

    def __init__(
        self,
        warner: Warner,
        members: Members,
        list_scalers: Callable[[], list[LossScaler]],
        unnamed: UnnamedWatch,
    ) -> None:
        super().__init__()
        self._unnamed = unnamed
        self._warner = warner
        self._members = members
        self._list_scalers = list_scalers
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self.blocks: dict[int, OpenBlock] = {}  # by the id of the block; the innermost is the last
        self._ended: list[EndedBlock] = []
        self._had_block: set[int] = set()  # optimizers, since their last step
        self._inside: dict[int, Line] = {}  # optimizers, and what gave them unscaled gradients in a block
        self._outside: dict[int, Line] = {}  # the same, where no block was open
        self.outside: Line | None = None  # what did so for the step that runs

    def patch(self, patcher: Patcher) -> None:
        """Replaces what gradients are made by."""
        patcher.replace(torch.autograd, "backward", self._watch_backward(torch.autograd.backward))

    # Blocks

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes that a block has begun whose gradients are scaled."""
        self.blocks[id(block)] = OpenBlock(block)
        self._had_block.update(map(id, block.optimizers))

    def end_block(self, block: ScaledLoss) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        ended = self.blocks.pop(id(block), None)
        if ended is None:
            return
        if not ended.was_scaled:
            self._inside.update(ended.unscaled)
        alive = []
        for one in self._ended:
            if one[0]() is not None:
                alive.append(one)
        self._ended = [*alive[1 - MANY :], (ref(block.scaled), block.scale, ended.was_scaled)]

    def list_blocks(self) -> list[OpenBlock]:
        """The open blocks of this thread."""
        return [one for one in list(self.blocks.values()) if one.thread == threading.get_ident()]

    # Backward

    def _watch_backward(self, run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def backward(tensors: object, grad_tensors: object = None, *args: object, **kwargs: object) -> None:
            seen: list[SeenGrad] = []
            marked: Marked | None = None
            blocks = list(self.blocks.values())  # at once: other threads may open some
            if blocks and tensors is blocks[-1].block.scaled:
                marked = self._begin_scaled(blocks[-1:])
            elif graph_task() == -1:  # not inside of another one
                roots = [tensors] if isinstance(tensors, Tensor) else tensors
                if scaled := self._find_scaled(roots):
                    marked = self._begin_scaled(scaled)
                elif (scale := self._find_late(roots)) is not None:
                    marked = self._unnamed.begin("late", scale, ())
                else:
                    seen = self._look_before(roots, is_whole=grad_tensors is None)
            try:
                run(tensors, grad_tensors, *args, **kwargs)
            finally:
                if marked is not None:
                    self._unnamed.end(marked)
                for found, key, line, param, grad, version in seen:
                    if param.grad is not grad or (grad is not None and grad._version != version):
                        found[key] = line

        return backward

    def _find_late(self, roots: object) -> Scale | None:
        """The scale of a block that has ended, if a backward begins at what it yielded, or what came of that.

        To look for it is to walk through a graph; what went backward in its block has none left, as a rule.
        """
        if not _are_tensors(roots):
            return None
        for find, scale, was_scaled in reversed(self._ended):
            scaled = find()
            if scaled is None or scaled.grad_fn is None:
                continue
            if any(root is scaled for root in roots) or (not was_scaled and leads_to(roots, scaled)):
                return scale
        return None

    def _find_scaled(self, roots: object) -> list[OpenBlock]:
        """The open blocks whose scaled losses a backward begins at, or at what came of them."""
        found = self.list_blocks() if _are_tensors(roots) else []
        return [one for one in found if leads_to(roots, one.block.scaled)]

    def _begin_scaled(self, blocks: Sequence[OpenBlock]) -> Marked | None:
        named: list[AmpOptimizer] = []
        for one in blocks:
            one.was_scaled = True
            named += one.block.optimizers
        return self._unnamed.begin("unnamed", blocks[-1].block.scale, named)

    def _look_before(self, roots: object, is_whole: bool) -> list[SeenGrad]:
        """Returns what shows whose gradients a backward makes that is not scaled.

        One that is not `is_whole` begins at gradients that a script gives it, which may be scaled.
        """
        blocks = self.list_blocks()
        for amp in self._members.optimizers():  # while what was cleared still shows that it was
            if (is_whole and not blocks) or amp.phase is Phase.UNNAMED:
                amp.read_grads(is_backward=True)
        if not (is_whole and _are_tensors(roots)):
            return []
        if not blocks:
            return _read_grads(self._list_dynamic(), self._outside)
        return [seen for one in blocks for seen in _read_grads(one.block.optimizers, one.unscaled)]

    def _list_dynamic(self) -> list[AmpOptimizer]:
        """The optimizers with a dynamic scale; what has a `backward`, as FP16_Optimizer, scales by itself."""
        found = [amp for amp in self._members.optimizers() if amp.call.scalers[0].is_dynamic]
        return [amp for amp in found if not hasattr(amp.find_given(), "backward")]

    # A step

    def had_block(self, amp: AmpOptimizer) -> bool:
        """Whether a block has named the optimizer since its last step."""
        return id(amp) in self._had_block

    def check_step(self, optimizer: AmpOptimizer) -> None:
        """Warns of gradients that a step must not use as they are; called before anything of it is done."""
        key = id(optimizer)
        if optimizer.unnamed.used:
            self._unnamed.check(optimizer, optimizer.unnamed.find_used())
        had_block = key in self._had_block
        if had_block:
            self._had_block.discard(key)
        inside, self.outside = self._inside.pop(key, None), self._outside.pop(key, None)
        if not (inside or self.outside) or all(param.grad is None for param in all_params(optimizer)):
            return
        if inside:
            self._warner.warn("inside", INSIDE, inside)
        elif not (had_block or _is_called_by_grad_scaler() or self._is_right(optimizer)):
            self._warner.warn("outside", OUTSIDE, self.outside)

    def _is_right(self, amp: AmpOptimizer) -> bool:
        """Whether a script may scale by hand, or steps zeros; one host sync, before a warning."""
        asked = [scaler.was_asked() for scaler in self._list_scalers()]  # all of them: it resets them
        return any(asked) or not any(
            param.grad.detach().any() for param in amp.model_params() if param.grad is not None
        )


def _are_tensors(roots: object) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(roots, (list, tuple)) and all(isinstance(root, Tensor) for root in roots)


def _is_called_by_grad_scaler() -> bool:
    """Whether the step that runs is one of an enabled GradScaler, whatever is around the optimizer."""
    code = inspect.unwrap(torch.amp.GradScaler.step).__code__  # `diagnose` puts a watch around it
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


def all_params(optimizer: AmpOptimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer steps, and those that its masters stand for."""
    yield from optimizer.params()
    for pair in optimizer.masters:
        yield pair.half


def _read_grads(optimizers: Sequence[AmpOptimizer], found: dict[int, Line]) -> list[SeenGrad]:
    """The gradients of the first and the last parameter of each optimizer; all would take too long."""
    seen, line = [], find_line()
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.optimizer.param_groups if group["params"]]
        pairs = optimizer.masters.pairs
        params = [groups[0][0], groups[-1][-1]] if groups else []
        params += [pairs[0].half, pairs[-1].half] if pairs else []
        for param in params:
            version = getattr(param.grad, "_version", -1)
            seen.append((found, id(optimizer), line, param, param.grad, version))
    return seen


def leads_to(roots: Sequence[Tensor], scaled: Tensor) -> bool:
    """Whether any of these tensors was computed from the scaled loss.

    Nodes of a graph are numbered as they are made, so those older than the scaled loss need no look.
    """
    target = scaled.grad_fn
    if any(root is scaled for root in roots) or target is None:
        return True
    first = target._sequence_nr()
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is target:
            return True
        inner = {one for one, _ in node.next_functions if one is not None and one._sequence_nr() >= first}
        waiting += inner - seen
        seen |= inner
    return False

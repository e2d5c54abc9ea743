"""Watches how gradients meet the loss scale, and warns where they are used as they must not be."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ampatch.levels.stack import Line, find_line
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.backwards import PlainBackward
    from ampatch.session.members import Members
    from ampatch.steps.block import ScaledLoss
    from ampatch.steps.optimizer import AmpOptimizer
    from ampatch.steps.scaler import LossScaler

RIGHT = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
INSIDE = (
    "backward() in a block of scale_loss began at a loss that is not scaled, and its gradients were divided "
    f"by the loss scale: call backward() on what scale_loss yields, {RIGHT}"
)
OUTSIDE = (
    "backward() outside of scale_loss made the gradients of a step at a dynamic loss scale: small ones may "
    f"be lost, and an overflow is not skipped: write {RIGHT}"
)
LATE = (
    "backward() began at a scaled loss after its block of scale_loss had ended, and nothing of it counts "
    f"for the growth of the scale: move backward() into the block, {RIGHT}"
)

Lines = dict[int, Line]  # of optimizers, by id


class ScaleWatch:
    """Notes what plain backwards gave to which optimizers, where the loss scale is no static 1.

    Optimizers are known by id, so that none is kept alive. What is found is told at the step that would use
    it: a warning that is made an error then stops the step, with nothing half done.
    """

    def __init__(
        self, warner: Warner, members: Members, list_scalers: Callable[[], list[LossScaler]]
    ) -> None:
        self._warner, self._members, self._list_scalers = warner, members, list_scalers
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._blocks: dict[int, Lines] = {}  # open blocks, by id: what gave unscaled gradients in it to whom
        self._had_block: set[int] = set()  # optimizers, since their last step
        self._inside: Lines = {}  # what gave them unscaled gradients in a block
        self._outside: Lines = {}  # the same, where no block was open

    # Blocks

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes that a block has begun whose gradients are scaled."""
        self._blocks[id(block)] = {}
        for optimizer in block.optimizers:
            self._had_block.add(id(optimizer))

    def end_block(self, block: ScaledLoss) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        unscaled = self._blocks.pop(id(block), None)
        if unscaled and not block.went_backward:
            self._inside.update(unscaled)

    # Backward

    def look_before(self, backward: PlainBackward) -> None:
        """Notes what shows whose gradients a backward makes that is not scaled."""
        if not backward.is_whole:
            return
        line = find_line()
        for optimizer in () if backward.blocks else self._list_dynamic():
            backward.notes.append((self._outside, id(optimizer), line, _see(optimizer)))
        for block in backward.blocks:
            for optimizer in block.optimizers:
                backward.notes.append((self._blocks[id(block)], id(optimizer), line, _see(optimizer)))

    def look_after(self, backward: PlainBackward) -> None:
        """Notes those that it gave gradients to."""
        for found, key, line, seen in backward.notes:
            if seen.list_changed():
                found[key] = line

    def warn_of_late(self) -> None:
        """Warns of a backward after its block."""
        self._warner.warn("late", LATE)

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
        had_block = key in self._had_block
        if had_block:
            self._had_block.discard(key)
        inside, outside = self._inside.pop(key, None), self._outside.pop(key, None)
        if not (inside or outside) or all(param.grad is None for param in optimizer.masters.stepped_params()):
            return
        if inside:
            self._warner.warn("inside", INSIDE, inside)
        elif not (had_block or _is_called_by_grad_scaler() or self._is_right(optimizer)):
            self._warner.warn("outside", OUTSIDE, outside)

    def _is_right(self, amp: AmpOptimizer) -> bool:
        """Whether a script may scale by hand, or steps zeros; one host sync, before a warning."""
        asked = [scaler.was_asked() for scaler in self._list_scalers()]  # all of them: it resets them
        return any(asked) or not any(
            param.grad.detach().any() for param in amp.masters.stepped_params() if param.grad is not None
        )


def _is_called_by_grad_scaler() -> bool:
    """Whether the step that runs is one of an enabled GradScaler, whatever is around the optimizer."""
    code = inspect.unwrap(torch.amp.GradScaler.step).__code__  # `diagnose` puts a watch around it
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


class SeenGrads:
    """Gradients as they were, to see which are made or written."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._seen = [(param, grad := param.grad, -1 if grad is None else grad._version) for param in params]

    def list_changed(self) -> list[Tensor]:
        """The parameters that have got other gradients, or another value in one."""
        return [
            param
            for param, grad, version in self._seen
            if param.grad is not grad or (grad is not None and grad._version != version)
        ]


def _see(optimizer: AmpOptimizer) -> SeenGrads:
    """Sees the gradients of the first and the last parameter; all would take too long."""
    groups = [group["params"] for group in optimizer.optimizer.param_groups if group["params"]]
    return SeenGrads([groups[0][0], groups[-1][-1]] if groups else [])

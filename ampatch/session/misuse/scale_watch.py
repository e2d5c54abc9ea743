"""Watches how gradients meet the loss scale, and warns where they are used as they must not be."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ampatch.levels.private import graph_task
from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.session.misuse.warner import Line, Warner, find_line
from ampatch.steps.grads import leads_to

if TYPE_CHECKING:
    from ampatch.steps.optimizer import AmpOptimizer
    from ampatch.steps.scaler import Scale

# Nobody means a limit below this, once the scale is taken off: it was given as if gradients were unscaled.
LEAST_LIMIT = 0.05

RIGHT = "`with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`"
INSIDE = (
    "backward() in a block of scale_loss began at a loss that is not scaled, and its gradients were divided "
    f"by the loss scale: call backward() on what scale_loss yields, {RIGHT}"
)
OUTSIDE = (
    "backward() outside of scale_loss made the gradients of a step at a dynamic loss scale: small ones may "
    f"be lost, and an overflow is not skipped: write {RIGHT}"
)
CLIPPED = (
    "gradients are clipped at {:g} inside a block of scale_loss, where they are still multiplied by the loss "
    "scale ({:g}), and masters have none yet: clip those of amp.master_params(optimizer) after the block"
)
TWO_SCALES = (
    "a GradScaler steps an optimizer whose gradients scale_loss scales and unscales: use one of the two; "
    "without the GradScaler, call optimizer.step()"
)


@dataclass(slots=True, eq=False)
class OpenBlock:
    """A block of `scale_loss` that is open, and what went backward in it."""

    scaled: Tensor
    scale: Scale
    optimizers: Sequence[AmpOptimizer]
    thread: int
    was_scaled: bool = False  # whether the scaled loss was part of any backward
    unscaled: dict[int, Line] = field(default_factory=dict)  # optimizers that others gave gradients to


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
        list_dynamic: Callable[[], Sequence[AmpOptimizer]],
        is_right: Callable[[AmpOptimizer], bool],
    ) -> None:
        super().__init__()
        self._is_right = is_right  # asked last, of a step whose gradients no block has made
        self._warner = warner
        self._list_dynamic = list_dynamic
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._blocks: dict[int, OpenBlock] = {}
        self._innermost: OpenBlock | None = None
        self._had_block: set[int] = set()  # optimizers, since their last step
        self._inside: dict[int, Line] = {}  # optimizers, and what gave them unscaled gradients in a block
        self._outside: dict[int, Line] = {}  # the same, where no block was open
        self._looked_at: set[int] = set()  # optimizers, for a GradScaler that steps them
        self._has_judged_clipping = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces what gradients are made and clipped by; private names of torch only where they exist."""
        patcher.replace(torch.autograd, "backward", self._watch_backward(torch.autograd.backward))
        for name, watch in (
            ("_clip_grads_with_norm_", self._watch_norm),
            ("_group_tensors_by_device_and_dtype", self._watch_value),
        ):
            if hasattr(clip_grad, name):
                patcher.replace(clip_grad, name, watch(getattr(clip_grad, name)))

    # Blocks

    def begin_block(
        self, block: object, scaled: Tensor, scale: Scale, optimizers: Sequence[AmpOptimizer]
    ) -> None:
        """Notes that a block begins, which yields `scaled`."""
        if scale.is_identity or self._patcher is None:
            return
        self._innermost = OpenBlock(scaled, scale, optimizers, threading.get_ident())
        self._blocks[id(block)] = self._innermost
        for optimizer in optimizers:
            self._had_block.add(id(optimizer))

    def end_block(self, block: object) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        ended = self._blocks.pop(id(block), None)
        if ended is None:
            return
        self._innermost = next(reversed(self._blocks.values()), None)
        if ended.unscaled and not ended.was_scaled:
            self._inside.update(ended.unscaled)

    def _list_blocks(self) -> list[OpenBlock]:
        """The open blocks of this thread."""
        return [block for block in self._blocks.values() if block.thread == threading.get_ident()]

    # Backward

    def _watch_backward(self, run: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(run)
        def backward(tensors: object, grad_tensors: object = None, *args: object, **kwargs: object) -> None:
            block = self._innermost
            if block is not None and tensors is block.scaled:
                block.was_scaled = True
                run(tensors, grad_tensors, *args, **kwargs)
                return
            with self._note_unscaled(tensors, grad_tensors):
                run(tensors, grad_tensors, *args, **kwargs)

        return backward

    def _note_unscaled(self, roots: object, grads: object) -> ExitStack:
        """Looks at what a backward begins at; the context around it finds whose gradients it makes.

        Not looked at are those inside of another one, and those that are given gradients to begin with,
        which may be scaled.
        """
        after = ExitStack()
        if grads is not None or graph_task() != -1:
            return after
        roots = [roots] if isinstance(roots, Tensor) else roots
        if not isinstance(roots, (list, tuple)) or not all(isinstance(root, Tensor) for root in roots):
            return after
        blocks = self._list_blocks()
        scaled = [block for block in blocks if leads_to(roots, block.scaled)]
        for block in scaled:
            block.was_scaled = True
        line = find_line()
        if blocks and not scaled:
            for block in blocks:
                after.callback(_note_changed, _read_grads(block.optimizers), block.unscaled, line)
        elif not blocks:
            after.callback(_note_changed, _read_grads(self._list_dynamic()), self._outside, line)
        return after

    # Clipping

    def _watch_norm(self, clip: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(clip)
        def clip_norm(parameters: object, max_norm: float, *args: object, **kwargs: object) -> None:
            if self._blocks:
                params = [parameters] if isinstance(parameters, Tensor) else parameters
                self._check_clipping([param.grad for param in params if param.grad is not None], max_norm)
            clip(parameters, max_norm, *args, **kwargs)

        return clip_norm

    def _watch_value(self, group: Callable[..., object]) -> Callable[..., object]:
        """Watches a function that `clip_grad_value_` calls, and so wherever a script has its name from."""

        @functools.wraps(group)
        def group_tensors(lists: list[list[Tensor]], *args: object, **kwargs: object) -> object:
            if self._blocks:
                caller = sys._getframe(1)
                if caller.f_code.co_name == "clip_grad_value_":
                    self._check_clipping(lists[0], caller.f_locals["clip_value"])
            return group(lists, *args, **kwargs)

        return group_tensors

    def _check_clipping(self, grads: list[Tensor], limit: float) -> None:
        """Warns of a limit that is not scaled, as the gradients are in a block; one host sync a session.

        Masters have no gradients there: to clip nothing is to clip theirs.
        """
        if self._has_judged_clipping or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            return
        given = set(map(id, grads))
        for block in self._list_blocks():
            known = {id(param.grad) for optimizer in block.optimizers for param in _all_params(optimizer)}
            if given & known or (
                not given and any(optimizer.masters.pairs for optimizer in block.optimizers)
            ):
                self._has_judged_clipping = True
                scale = block.scale.scaler.get_scale()
                if limit / scale < LEAST_LIMIT:
                    self._warner.warn("clipping", CLIPPED.format(float(limit), scale))
                return

    # A step

    def check_step(self, optimizer: AmpOptimizer) -> None:
        """Warns of gradients that a step must not use as they are; called before anything of it is done."""
        key = id(optimizer)
        had_block = key in self._had_block
        if had_block:
            self._had_block.discard(key)
            if key not in self._looked_at and _is_called_by_grad_scaler():
                self._warner.warn("GradScaler", TWO_SCALES)
            self._looked_at.add(key)
        inside, outside = self._inside.pop(key, None), self._outside.pop(key, None)
        if not (inside or outside) or all(param.grad is None for param in _all_params(optimizer)):
            return
        if inside:
            self._warner.warn("inside", INSIDE, inside)
        elif not (had_block or _is_called_by_grad_scaler() or self._is_right(optimizer)):
            self._warner.warn("outside", OUTSIDE, outside)


def _is_called_by_grad_scaler() -> bool:
    """Whether the step that runs is one of an enabled GradScaler, whatever is around the optimizer."""
    code = torch.amp.GradScaler.step.__code__
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and frame.f_locals["self"].is_enabled()


def _all_params(optimizer: AmpOptimizer) -> Iterator[Tensor]:
    """The parameters that an optimizer steps, and those that its masters stand for."""
    yield from optimizer.params()
    for pair in optimizer.masters:
        yield pair.half


def _read_grads(optimizers: Sequence[AmpOptimizer]) -> list[tuple[int, Tensor, Tensor | None, int]]:
    """The gradients of the first and the last parameter of each optimizer; all would take too long."""
    found = []
    for optimizer in optimizers:
        groups = [group["params"] for group in optimizer.optimizer.param_groups if group["params"]]
        pairs = optimizer.masters.pairs
        params = [groups[0][0], groups[-1][-1]] if groups else []
        params += [pairs[0].half, pairs[-1].half] if pairs else []
        for param in params:
            found.append((id(optimizer), param, param.grad, getattr(param.grad, "_version", -1)))
    return found


def _note_changed(
    before: list[tuple[int, Tensor, Tensor | None, int]], found: dict[int, Line], line: Line
) -> None:
    """Notes the optimizers that have other gradients than before."""
    for key, param, grad, version in before:
        if param.grad is not grad or (grad is not None and grad._version != version):
            found[key] = line

"""Gradients that are clipped in a block of `scale_loss`, where they are still scaled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from threading import get_ident

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ampatch.levels.precision import HALF_TYPES
from ampatch.levels.stack import Line, find_line
from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.session.members import Members
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.misuse.loss_scale import ScaleWatch, all_params
from ampatch.watching.misuse.unnamed import UnnamedWatch
from ampatch.watching.misuse.warner import Warner

# Nobody means a limit below this, once the scale is taken off: it was given as if gradients were unscaled.
LEAST_LIMIT = 0.05

CLIPPED = (
    "gradients are clipped at {:g} inside a block of scale_loss, where they are still multiplied by the loss "
    "scale ({:g}), and masters have none yet: clip those of amp.master_params(optimizer) after the block"
)


IGNORED = (
    "gradients of the half model changed after the block of scale_loss that made them, and the step ignores "
    "that: clip amp.master_params(optimizer) in the place of model.parameters(), and call backward() inside "
    "scale_loss"
)


class ClipWatch(SessionPatch):
    """Watches what gradients are clipped by; private names of torch only where they exist."""

    def __init__(
        self, warner: Warner, scale_watch: ScaleWatch, unnamed: UnnamedWatch, members: Members
    ) -> None:
        super().__init__()
        self._warner = warner
        self._scale_watch, self._unnamed, self._members = scale_watch, unnamed, members
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._has_judged = False
        self._line: Line | None = None  # where gradients of half weights were clipped last,
        self._limit, self._norm = 0.0, None  # at which limit, and what their norm was

    def patch(self, patcher: Patcher) -> None:
        """Replaces what `clip_grad_norm_` and `clip_grad_value_` call, wherever a script has them from."""
        for name, watch in (
            ("_get_total_norm", self._watch_total),
            ("_clip_grads_with_norm_", self._watch_norm),
            ("_group_tensors_by_device_and_dtype", self._watch_value),
        ):
            if hasattr(clip_grad, name):
                patcher.replace(clip_grad, name, watch(getattr(clip_grad, name)))

    def _watch_total(self, measure: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(measure)
        def get_total_norm(tensors: Iterable[Tensor], *args: object, **kwargs: object) -> Tensor:
            grads = tensors if isinstance(tensors, Tensor) else list(tensors)
            if not torch.compiler.is_dynamo_compiling():
                self._unnamed.show(grads)
            return measure(grads, *args, **kwargs)

        return get_total_norm

    def _watch_norm(self, clip: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(clip)
        def clip_norm(parameters: object, max_norm: float, *args: object, **kwargs: object) -> None:
            params = [parameters] if isinstance(parameters, Tensor) else parameters
            if self._is_inside():
                self._check([param.grad for param in params if param.grad is not None], max_norm)
            elif any(param.dtype in HALF_TYPES for param in params):
                self._note_line(max_norm, args[0] if args else kwargs.get("total_norm"))
            clip(parameters, max_norm, *args, **kwargs)

        return clip_norm

    def _watch_value(self, group: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(group)
        def group_tensors(lists: list[list[Tensor]], *args: object, **kwargs: object) -> object:
            is_inside = self._is_inside()
            if is_inside or any(grad.dtype in HALF_TYPES for grad in lists[0]):
                caller = sys._getframe(1)
                is_clipping = caller.f_code.co_name == "clip_grad_value_"
                if is_clipping and is_inside:
                    self._check(lists[0], caller.f_locals["clip_value"])
                elif is_clipping:
                    self._note_line()
            if not torch.compiler.is_dynamo_compiling():
                self._unnamed.show(lists[0])
            return group(lists, *args, **kwargs)

        return group_tensors

    def _is_inside(self) -> bool:
        return bool(self._scale_watch.blocks) or any(map(_waits_with_masters, self._members.optimizers()))

    def _note_line(self, limit: float = 0.0, norm: object = None) -> None:
        if not torch.compiler.is_dynamo_compiling():
            self._line, self._limit, self._norm = find_line(), limit, norm

    def warn_of_ignored(self) -> bool:
        """Warns of a step that ignores what was done to gradients of half weights, and says so.

        Clipping at a limit that their norm does not reach changes nothing; one host sync to know.
        """
        line, norm = self._scale_watch.outside or self._line, self._norm
        if self._scale_watch.outside is None and isinstance(norm, Tensor) and norm <= self._limit:
            return False
        self._warner.warn("ignored", IGNORED, line)
        return True

    def _check(self, grads: list[Tensor], limit: float) -> None:
        """Warns of a limit that is not scaled, as the gradients are in a block; one host sync a session.

        Masters have no gradients there: to clip nothing is to clip theirs.
        """
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._has_judged or is_capturing:
            return
        given = set(map(id, grads))
        blocks = [one.block for one in self._scale_watch.list_blocks()]
        known = [block for block in blocks if given & _ids_of_grads(block.optimizers)]
        is_ignored = any(_misses_masters(amp, given) for amp in self._members.optimizers())
        if not (known or is_ignored):
            return
        self._has_judged = True
        scale = next((block.scale.scaler.get_scale() for block in known or blocks), 1.0)
        if is_ignored or limit / scale < LEAST_LIMIT:
            self._warner.warn("clipping", CLIPPED.format(float(limit), scale))


def _ids_of_grads(optimizers: Iterable[AmpOptimizer]) -> set[int]:
    return {id(param.grad) for optimizer in optimizers for param in all_params(optimizer)}


def _waits_with_masters(amp: AmpOptimizer) -> bool:
    """Whether a block of this thread is open that will give masters their gradients at its end."""
    return amp.end_block is not None and bool(amp.masters.pairs) and amp.thread == get_ident()


def _misses_masters(amp: AmpOptimizer, given: set[int]) -> bool:
    """Whether such masters would be clipped, if they had gradients: others beside them are, or none."""
    halves = {id(pair.half.grad) for pair in amp.masters}
    own = {id(param.grad) for param in amp.own_params()}
    return _waits_with_masters(amp) and not given & halves and (not given or bool(given & own))

"""Gradients that are clipped in a block of `scale_loss`, where they are still scaled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.session.backwards import ScaledBackwards
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.misuse.warner import Warner

# Nobody means a limit below this, once the scale is taken off: it was given as if gradients were unscaled.
LEAST_LIMIT = 0.05

CLIPPED = (
    "gradients are clipped at {:g} inside a block of scale_loss, where they are still multiplied by the loss "
    "scale ({:g}): clip them after the block"
)


class ClipWatch(SessionPatch):
    """Watches what gradients are clipped by; private names of torch only where they exist."""

    def __init__(self, warner: Warner, backwards: ScaledBackwards) -> None:
        super().__init__()
        self._warner, self._backwards = warner, backwards
        self.forget()

    def forget(self) -> None:
        """Drops what was seen."""
        self._has_judged = False

    def patch(self, patcher: Patcher) -> None:
        """Replaces what `clip_grad_norm_` and `clip_grad_value_` call, wherever a script has them from."""
        for name, watch in (
            ("_clip_grads_with_norm_", self._watch_norm),
            ("_group_tensors_by_device_and_dtype", self._watch_value),
        ):
            if hasattr(clip_grad, name):
                patcher.replace(clip_grad, name, watch(getattr(clip_grad, name)))

    def _watch_norm(self, clip: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(clip)
        def clip_norm(parameters: object, max_norm: float, *args: object, **kwargs: object) -> None:
            params = [parameters] if isinstance(parameters, Tensor) else parameters
            if self._backwards.blocks:
                self._check([param.grad for param in params if param.grad is not None], max_norm)
            clip(parameters, max_norm, *args, **kwargs)

        return clip_norm

    def _watch_value(self, group: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(group)
        def group_tensors(lists: list[list[Tensor]], *args: object, **kwargs: object) -> object:
            caller = sys._getframe(1) if self._backwards.blocks else None
            if caller is not None and caller.f_code.co_name == "clip_grad_value_":
                self._check(lists[0], caller.f_locals["clip_value"])
            return group(lists, *args, **kwargs)

        return group_tensors

    def _check(self, grads: list[Tensor], limit: float) -> None:
        """Warns of a limit that is not scaled, as the gradients are in a block; one host sync a session."""
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._has_judged or is_capturing:
            return
        given = set(map(id, grads))
        known = [block for block in self._backwards.list_open() if given & _ids_of_grads(block.optimizers)]
        if not known:
            return
        self._has_judged = True
        scale = known[0].scale.scaler.get_scale()
        if limit / scale < LEAST_LIMIT:
            self._warner.warn("clipping", CLIPPED.format(float(limit), scale))


def _ids_of_grads(optimizers: Iterable[AmpOptimizer]) -> set[int]:
    return {id(param.grad) for optimizer in optimizers for param in optimizer.masters.stepped_params()}

"""A GradScaler beside `scale_loss`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch.amp import GradScaler

from ampatch.patching.patcher import Patcher, SessionPatch
from ampatch.watching.misuse.loss_scale import ScaleWatch
from ampatch.watching.misuse.warner import Warner

if TYPE_CHECKING:
    from ampatch.session.members import Members

BESIDE = (
    "a GradScaler steps an optimizer whose gradients scale_loss scales and unscales: use one of the two; "
    "without the GradScaler, call optimizer.step()"
)


class GradScalerWatch(SessionPatch):
    """Watches where a GradScaler looks at gradients: it is known there, even where it skips the step."""

    def __init__(self, warner: Warner, members: Members, scale_watch: ScaleWatch) -> None:
        super().__init__()
        self._warner = warner
        self._members = members
        self._scale_watch = scale_watch

    def patch(self, patcher: Patcher) -> None:
        """Replaces what a GradScaler unscales by, or looks by for a fused optimizer; it has no hooks."""
        for name in ("unscale_", "_check_inf_per_device"):
            if hasattr(GradScaler, name):
                patcher.replace(GradScaler, name, self._watch(getattr(GradScaler, name)))

    def _watch(self, run: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(run)
        def watched(scaler: GradScaler, optimizer: object, *args: object, **kwargs: object) -> object:
            if scaler.is_enabled():
                self._check(optimizer)
            return run(scaler, optimizer, *args, **kwargs)

        return watched

    def _check(self, optimizer: object) -> None:
        amp = self._members.find(optimizer)
        if amp is None:
            return
        if self._scale_watch.had_block(amp):
            self._warner.warn("GradScaler", BESIDE)

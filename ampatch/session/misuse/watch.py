"""All that is watched for misuse while a session is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ampatch.levels.loss_scale import StaticLossScale
from ampatch.session.misuse.calls import check_ranks, check_request, check_rounded, check_trainer
from ampatch.session.misuse.clipping import ClipWatch
from ampatch.session.misuse.grad_scaler import GradScalerWatch
from ampatch.session.misuse.half_weights import HalfWatch, check_halved
from ampatch.session.misuse.loss_scale import ScaleWatch
from ampatch.session.misuse.strangers import StrangerWatch
from ampatch.session.misuse.unnamed import UnnamedWatch
from ampatch.session.misuse.warner import Warner
from ampatch.steps.grads import are_any

if TYPE_CHECKING:
    from ampatch.levels.policy import Policy
    from ampatch.levels.stack import Line
    from ampatch.session.members import Members
    from ampatch.session.request import Request
    from ampatch.steps.block import ScaledLoss
    from ampatch.steps.optimizer import AmpOptimizer
    from ampatch.steps.scaler import LossScaler


class MisuseWatch:
    """Tells each kind of misuse once a session."""

    def __init__(
        self, members: Members, list_scalers: Callable[[], list[LossScaler]], halved: dict[int, Line]
    ) -> None:
        self._halved = halved  # float32 tensors that became half, by id
        self._warner = Warner()
        self._unnamed = UnnamedWatch(self._warner, members)
        self._scale = ScaleWatch(self._warner, members, list_scalers, self._unnamed)
        self._clip = ClipWatch(self._warner, self._scale, self._unnamed)
        self._scaler = GradScalerWatch(self._warner, members, self._scale)
        self._half = HalfWatch(self._warner, members)
        self._strangers = StrangerWatch(self._warner, members, self._half, self._unnamed)

    def forget(self) -> None:
        """Lets everything be said again."""
        self._warner.forget()
        self._unnamed.forget()

    def retry(self) -> None:
        """Undoes what somebody else's patch kept from being undone, where that is gone by now."""
        for patch in (self._scale, self._clip, self._scaler, self._half):
            patch.retry()

    def open(self, policy: Policy, undo: ExitStack) -> None:
        """Patches what a call of this policy needs watched; `undo` receives the way back."""
        is_scaled = policy.loss_scale != StaticLossScale(1.0)
        if is_scaled:
            self._scale.open(undo)
        if is_scaled or policy.master_weights:
            self._clip.open(undo)
            self._scaler.open(undo)
        if policy.casts_model:
            self._half.open(undo)
        if is_scaled or policy.casts_model:
            self._strangers.open(undo)

    def check_request(self, request: Request, amps: Sequence[AmpOptimizer], rounded: Sequence[str]) -> None:
        """Warns of a call of `initialize` that works, and trains wrongly; `rounded` names what half moves."""
        check_request(self._warner, request, amps)
        check_rounded(self._warner, rounded, request.policy)

    def check_trainer(self, wrapper: object) -> None:
        """Warns of a trainer that casts and scales as well, by the wrapper of its optimizer."""
        check_trainer(self._warner, wrapper)

    def end_open(self, request: Request) -> None:
        """Watches the models of a call, once nothing of it can raise any more."""
        if request.policy.casts_model:
            self._half.watch(request.models, request.policy.master_weights)

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes that a block has begun."""
        self._scale.begin_block(block)

    def close_block(self, block: ScaledLoss) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        self._scale.end_block(block)

    def begin_step(self, amp: AmpOptimizer) -> None:
        """Warns of what a step must not use as it is; called before anything of it is done."""
        self._scale.check_step(amp)
        check_ranks(self._warner, amp)
        if self._halved:
            check_halved(self._warner, self._halved, amp)

    def ignore_edits(self) -> bool:
        """Warns of half gradients that were changed where masters do not see it, and says if it did."""
        return self._clip.warn_of_ignored()

    def use_unnamed(self, amp: AmpOptimizer) -> None:
        """Warns of scaled gradients that a step is about to use; before anything of it is done."""
        left = amp.unnamed.find()
        self._unnamed.check(amp, are_any(left) if left else amp.unnamed.find_lost() or None)

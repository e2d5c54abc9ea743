"""All that is watched for misuse while a session is open."""

from __future__ import annotations

from contextlib import ExitStack

from ampatch.levels.loss_scale import StaticLossScale
from ampatch.session.backwards import PlainBackward
from ampatch.session.request import Opening, SessionListener
from ampatch.session.session import Session
from ampatch.steps.block import ScaledLoss
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.misuse.averages import AverageWatch
from ampatch.watching.misuse.buffers import check_rounded, watch_buffers
from ampatch.watching.misuse.calls import check_ranks, check_request, check_trainer
from ampatch.watching.misuse.clipping import ClipWatch
from ampatch.watching.misuse.grad_scaler import GradScalerWatch
from ampatch.watching.misuse.half_weights import HalfWatch, check_halved
from ampatch.watching.misuse.loss_scale import ScaleWatch
from ampatch.watching.misuse.strangers import StrangerWatch
from ampatch.watching.misuse.warner import Warner


class MisuseWatch(SessionListener):
    """Tells each kind of misuse once a session."""

    def __init__(self, session: Session) -> None:
        self._session, members = session, session.members
        self._halved = session.data_watch.halved  # float32 tensors that became half, by id
        self._warner = Warner()
        self._backwards = session.scaled_backwards
        self._scale = ScaleWatch(self._warner, members, session.scalers)
        self._clip = ClipWatch(self._warner, self._backwards)
        self._scaler = GradScalerWatch(self._warner, members, self._scale)
        self._half = HalfWatch(self._warner, members)
        self._averages = AverageWatch(self._warner, session.data_watch.views)
        self._strangers = StrangerWatch(self._warner, members, self._half)

    def session_closed(self, _: None) -> None:
        """Undoes what somebody else's patch kept from being undone, and lets everything be said again."""
        for patch in (self._clip, self._scaler, self._half):
            patch.retry()
        self._warner.forget()
        self._scale.forget()
        self._averages.forget()

    def call_opens(self, opening: Opening) -> None:
        """Patches what a call of this policy needs watched."""
        policy, undo = opening.request.policy, opening.undo
        if policy.loss_scale != StaticLossScale(1.0):
            self._open_scaled(undo)
        if policy.master_weights:
            self._scaler.open(undo)
        if policy.casts_model:
            self._half.open(undo)
            self._strangers.open(undo)

    def _open_scaled(self, undo: ExitStack) -> None:
        for watch in (self._clip, self._scaler, self._strangers):
            watch.open(undo)

    def call_is_set_up(self, opening: Opening) -> None:
        """Warns of a call of `initialize` that works, and trains wrongly."""
        check_request(self._warner, opening.request, opening.amps)
        check_rounded(self._warner, opening.rounded, opening.request.policy)
        if opening.request.policy.casts_model:
            watch_buffers(self._warner, opening)

    def call_opened(self, opening: Opening) -> None:
        """Watches the models of a call."""
        request = opening.request
        if request.policy.casts_model:
            self._half.watch(request.models, request.policy.master_weights)

    def wrapper_is_used(self, wrapper: object) -> None:
        """Warns of a trainer that casts and scales as well, by the wrapper of its optimizer."""
        check_trainer(self._warner, wrapper)

    def block_begins(self, block: ScaledLoss) -> None:
        """Notes that a block has begun, by which it may be known that a scale of 1 was set to another."""
        if block.scale.is_identity:
            return
        if not self._clip.is_open:
            with ExitStack() as undo:
                self._open_scaled(undo)
                self._session.enter(undo.pop_all())
        self._scale.begin_block(block)
        if self._strangers.strangers:
            self._strangers.begin_block(block)

    def block_ends(self, block: ScaledLoss) -> None:
        """Notes that a block ends, before its gradients are unscaled."""
        if not block.scale.is_identity:
            self._scale.end_block(block)
            if self._strangers.strangers:
                self._strangers.end_block()

    def plain_backward_begins(self, backward: PlainBackward) -> None:
        """Notes who has gradients before it."""
        self._scale.look_before(backward)

    def plain_backward_ended(self, backward: PlainBackward) -> None:
        """Notes who has others after it."""
        self._scale.look_after(backward)

    def late_backward_begins(self, _: None) -> None:
        """Warns of a backward after its block, before it runs."""
        self._scale.warn_of_late()

    def step_begins(self, amp: AmpOptimizer) -> None:
        """Warns of what a step must not use as it is; called before anything of it is done."""
        if self._backwards.is_open:
            self._scale.check_step(amp)
        if amp.local.are_alone and amp.pending:
            check_ranks(self._warner, amp)
        if copies := self._session.shared.copies:
            self._averages.check_step(copies)
        if self._halved:
            check_halved(self._warner, self._halved, amp)

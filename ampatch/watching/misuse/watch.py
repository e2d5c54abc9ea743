"""All that is watched for misuse while a session is open, and the calls that are looked at themselves."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from operator import attrgetter

import torch
from torch.optim import Optimizer

from ampatch.casts.cast import CASTS
from ampatch.levels.loss_scale import StaticLossScale
from ampatch.session.request import Opening, Request, SessionListener
from ampatch.session.session import Session
from ampatch.steps.block import PlainBackward, ScaledLoss
from ampatch.steps.optimizer import AmpOptimizer
from ampatch.watching.misuse.gradients import ClipWatch, GradScalerWatch, ScaleWatch, UnknownOptimizers
from ampatch.watching.misuse.half_weights import (
    AverageWatch,
    HalfWatch,
    check_halved,
    check_rounded,
    watch_buffers,
)
from ampatch.watching.observers import Warner


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
        self._unknown = UnknownOptimizers(self._warner, members, self._half)

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
            self._unknown.open(undo)

    def _open_scaled(self, undo: ExitStack) -> None:
        for watch in (self._clip, self._scaler, self._unknown):
            watch.open(undo)

    def call_is_set_up(self, opening: Opening) -> None:
        check_request(self._warner, opening.request, opening.amps)
        check_rounded(self._warner, opening.rounded, opening.request.policy)
        if opening.request.policy.casts_model:
            watch_buffers(self._warner, opening)

    def call_opened(self, opening: Opening) -> None:
        request = opening.request
        if request.policy.casts_model:
            self._half.watch(request.models, request.policy.master_weights)

    def wrapper_is_used(self, wrapper: object) -> None:
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
        if self._unknown.unknown:
            self._unknown.begin_block(block)

    def block_ends(self, block: ScaledLoss) -> None:
        if not block.scale.is_identity:
            self._scale.end_block(block)
            if self._unknown.unknown:
                self._unknown.end_block()

    def plain_backward_begins(self, backward: PlainBackward) -> None:
        self._scale.look_before(backward)

    def plain_backward_ended(self, backward: PlainBackward) -> None:
        self._scale.look_after(backward)

    def late_backward_begins(self, _: None) -> None:
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


def check_ranks(warner: Warner, amp: AmpOptimizer) -> None:
    """Warns of ranks that may not skip a step together, whose gradients nobody averages; no host sync."""
    if amp.list_groups():
        return
    if hasattr(amp.find_outer(), "averager"):  # PostLocalSGDOptimizer, whose ranks are to step alone
        return
    if torch.distributed.get_world_size() > 1:
        warner.warn(
            "ranks",
            f"{type(amp.optimizer).__name__}: nothing makes the ranks skip a step together, as the model is "
            f"in no DistributedDataParallel and its parameters are on no device mesh: if ranks average "
            f"gradients by hand, or hold stages of a model, pass initialize(process_group=...), the group of "
            f"these ranks; if each trains a model of its own, ignore this",
        )


# Where the wrapper that a trainer puts around an optimizer says the trainer's own precision, and its remedy.
_TRAINERS = {
    "accelerator_state.mixed_precision": "Accelerator(mixed_precision='no'), or TrainingArguments without "
    "fp16 and bf16",
    "_strategy.precision_plugin.precision": "Trainer(precision='32-true')",
    "_strategy.precision.precision": "Fabric(precision='32-true')",
}


def check_trainer(warner: Warner, wrapper: object) -> None:
    """Warns of a trainer that casts and scales as well, by the wrapper of its optimizer."""
    for path, remedy in _TRAINERS.items():
        try:
            precision = attrgetter(path)(wrapper)
        except AttributeError:
            continue
        if precision not in ("no", "32-true", "64-true"):
            warner.warn(
                "trainer",
                f"two mixed precisions meet: the trainer of this {type(wrapper).__name__} has its own, "
                f"{precision!r}, beside that of ampatch: each casts what the other one has cast, and "
                f"gradients may be scaled twice: write {remedy}, or pass initialize(enabled=False)",
            )


def check_request(warner: Warner, request: Request, amps: Sequence[AmpOptimizer]) -> None:
    """Warns of a call of `initialize` that works, and trains wrongly."""
    policy = request.policy
    if CASTS.half is not None and not policy.patch_torch_functions and hasattr(sys, "ps1"):  # of a prompt
        warner.warn(
            "levels",
            f"{policy.opt_level} patches no functions, but outside of its models those that an earlier "
            f"initialize patched go on casting to {CASTS.half}: call ampatch.uninitialize() first, unless "
            f"both train side by side",
        )
    params = [param for model in request.models for param in model.parameters() if param.is_floating_point()]
    if policy.half is not None and params and all(param.dtype is torch.float64 for param in params):
        warner.warn(
            "float64",
            f"the model is float64, which {policy.opt_level} does not cast: call model.float() before "
            f"initialize",
        )
    optimizers = [amp.optimizer for amp in amps if not policy.master_weights]
    for optimizer, group in [(one, group) for one in optimizers for group in one.param_groups]:
        if _loses_eps(optimizer, group):
            warner.warn(
                "eps",
                f"eps={group['eps']} of {type(optimizer).__name__} is 0 in float16, the type of its "
                f"steps, and small gradients make it divide by 0: pass eps=1e-4, or use opt_level='O2', "
                f"which has float32 masters",
            )


def _loses_eps(optimizer: Optimizer, group: dict) -> bool:
    """Whether the eps of a group is 0 in float16; fused kernels add it in float32, others may do so."""
    eps = group.get("eps")
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")
    if not is_torchs or group.get("fused") or not isinstance(eps, float) or eps == 0:
        return False
    has_half = any(param.dtype is torch.float16 for param in group["params"])
    return has_half and abs(eps) <= 2.0**-25  # which is rounded to 0

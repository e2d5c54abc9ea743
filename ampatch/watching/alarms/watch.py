"""Follows the loss scales of a session: judges each step, raises alarms, and has post-mortems written."""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.levels.loss_scale import Alarms, parse_alarms
from ampatch.levels.ranks import find_rank
from ampatch.models.model import select_python
from ampatch.session.request import Opening, SessionListener
from ampatch.steps.block import ScaledLoss
from ampatch.steps.optimizer import AmpOptimizer, InitializeCall
from ampatch.steps.scaler import BackwardOutcome, LossScaler
from ampatch.watching.alarms.history import Alarm, Ring, ScaleHistory, ScaleUpdate, explain_alarm, name_loss
from ampatch.watching.observers import OBSERVERS
from ampatch.watching.post_mortem import (
    LastForward,
    pack,
    parse_post_mortem,
    write,
)

logger = logging.getLogger("ampatch")
MOST_UNREAD = 8  # steps whose outcome nobody has read, until they are read together
MOST_POST_MORTEMS = 3  # of one call of `initialize`
SLOTS = 8  # losses that go to the host together: one copy for all of them
SEARCH_ENDS = 128.0  # no search of a scale goes below
KEEP = "With initialize(post_mortem=True) the first alarm writes a post-mortem for `ampatch doctor --open`"


# ---- Which alarms there is a reason for ----


class Judge:
    """Says which alarms the updates of one loss raise; see `Alarms` for the rules.

    The first overflows, until a step is clean, are the scale's search, and so is one that follows a growth at
    once: where the scale was good is not known yet. A scale that somebody raised is searched for again.
    """

    def __init__(self, limits: Alarms) -> None:
        self._limits = limits
        self._is_searching = True
        self._has_grown = False  # at the step before
        self._scale = math.inf  # that the step before left
        self._in_a_row, self._fell_in_row = 0, False  # skipped steps, and whether the scale fell at one
        self._falls: deque[int] = deque(maxlen=limits.falls or 1)  # the steps of the latest, one a row
        self._is_low = False
        self.is_calm = False  # whether a clean step at the same scale would change nothing here
        self._held: dict[str, int] = {}  # the step at which each kind last had a reason

    def take(self, update: ScaleUpdate, floor: float = 0.0) -> tuple[str, ...]:
        """Takes the next update, and returns the kinds of alarms to raise.

        `floor` is the least that the scale may become.
        """
        is_searching = self._is_searching or update.scale > self._scale
        is_search = is_searching or self._has_grown
        self._is_searching = is_searching and update.skipped and update.next_scale >= SEARCH_ENDS
        self._has_grown = update.next_scale > update.scale
        self._scale = update.next_scale
        self.is_calm = False
        if not update.skipped:
            self._in_a_row, self._fell_in_row = 0, False
            if update.loss_is_finite is not False and not self._is_low:
                self.is_calm = not self._has_grown
                return ()
        elif not is_search:
            self._in_a_row += 1
            if update.next_scale < update.scale and not self._fell_in_row:
                self._fell_in_row = True
                self._falls.append(update.step)
        reasons = self._find_reasons(update, is_search, floor)
        return tuple([kind for kind, holds in reasons.items() if holds and self._is_new(kind, update.step)])

    def _find_reasons(self, update: ScaleUpdate, is_search: bool, floor: float) -> dict[str, bool]:
        """Says of each kind whether there is a reason for it."""
        limits, skipped, after = self._limits, update.skipped, update.next_scale
        self._is_low = (self._is_low or skipped) and after < (limits.scale_below or 0.0)
        has_fallen = len(self._falls) == limits.falls and update.step - self._falls[0] < limits.within
        is_least = after <= floor and (not is_search or update.scale <= floor)
        return {
            "loss": limits.loss and update.loss_is_finite is False,
            "skipped": limits.skipped is not None and self._in_a_row >= limits.skipped,
            "falls": skipped and has_fallen,
            "low": self._is_low,
            "minimum": limits.minimum and skipped and is_least,
        }

    def _is_new(self, kind: str, step: int) -> bool:
        before = self._held.get(kind)
        self._held[kind] = step
        return before is None or step - before > self._limits.within


# ---- What is kept of a session ----


@dataclass(slots=True, eq=False)
class FollowedCall:
    """A call of `initialize` that is followed: its limits, and the folder of its post-mortems."""

    call: InitializeCall
    limits: Alarms | None
    folder: Path | None
    post_mortems: int = 0  # that were written
    # The models, each with what its last forward was given, which goes with the hook that holds it.
    forwards: list[tuple[weakref.ref[Module], weakref.ref[LastForward]]] = field(default_factory=list)

    def live_forwards(self) -> dict[Module, LastForward]:
        """The models that are still there, each with what its last forward was given."""
        pairs = [(model(), forward()) for model, forward in self.forwards]
        return {model: forward for model, forward in pairs if model is not None and forward is not None}


@dataclass(slots=True, eq=False)
class SeenStep:
    """What is kept for one optimizer until its next step."""

    losses: dict[int, Tensor] = field(default_factory=dict)  # of blocks at static scales, by loss_id
    forwards: list[weakref.ref[LastForward]] = field(default_factory=list)  # of its models


@dataclass(slots=True, eq=False)
class FollowedLoss:
    """What is kept for one loss."""

    scaler: LossScaler
    call: FollowedCall
    ring: Ring
    judge: Judge | None
    begun: int = 0  # steps, including those that nobody has read
    last_alarm: int | None = None

    def is_calm(self) -> bool:
        """Whether a clean step at the scale of the one before would change nothing."""
        return self.judge is None or self.judge.is_calm

    def count_if_calm(self, outcomes: Sequence[BackwardOutcome]) -> bool:
        """Counts a step that was clean, at the scale of the one before; says whether it was one."""
        scale = self.ring.scale
        for outcome in outcomes:
            overflow, before, after = outcome.read()
            if overflow or before != scale or after != scale or not outcome.is_loss_finite:
                return False
        return self.count_clean(scale)

    def count_clean(self, scale: float) -> bool:
        """Counts a clean step, unless there is something to note or to judge; says whether it did."""
        is_calm = scale == self.ring.scale and self.is_calm()
        self.ring.steps += is_calm
        return is_calm


Unread = tuple[FollowedLoss, int, Sequence[BackwardOutcome]]  # the outcomes of a step


class LossRing:
    """Brings losses from a device to the host, some at a time, and never waits for them.

    A loss is copied into a slot on the device. Once all are taken, one copy brings them to the host; they
    are known when it has arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.zeros(SLOTS, dtype=torch.float32, device=device)
        self._slots = self._numbers.unbind()
        self._keys: list[object] = []
        self.sent: list[tuple[list[object], Tensor, torch.cuda.Event | None]] = []  # on their way

    def put(self, key: object, loss: Tensor) -> None:
        """Takes the loss of a step, under a key; no host sync."""
        self._slots[len(self._keys)].copy_(loss)
        self._keys.append(key)
        if len(self._keys) == SLOTS:
            self._send()

    def _send(self) -> None:
        keys, self._keys = self._keys, []
        if not self._numbers.is_cuda:
            self.sent.append((keys, self._numbers.clone(), None))
            return
        host = torch.empty(SLOTS, dtype=torch.float32, device="cpu", pin_memory=True)
        host.copy_(self._numbers, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record(torch.cuda.current_stream(self._numbers.device))
        self.sent.append((keys, host, arrival))

    def take(self, *, all_of_them: bool = False) -> Iterator[tuple[object, float]]:
        """Yields the keys and losses that have arrived, oldest first; `all_of_them` waits for the rest."""
        if all_of_them and self._keys:
            self._send()
        while self.sent:
            keys, numbers, arrival = self.sent[0]
            if arrival is not None and all_of_them:
                arrival.synchronize()
            if arrival is not None and not arrival.query():
                return
            del self.sent[0]
            yield from zip(keys, numbers.tolist(), strict=False)


class AlarmWatch(SessionListener):
    """Notes at each step what became of the loss scale, as soon as the host knows.

    With a dynamic scale that is what the step reads anyway; with an optimizer that skips on the device it
    arrives a little later. Of a static scale only the losses are looked at, some steps later and all at once.
    """

    def __init__(self) -> None:
        self.callbacks: OrderedDict[int, Callable[[Alarm], object]] = OrderedDict()
        self._reading = threading.RLock()  # of the thread that reads, whose callbacks may read as well
        self.session_closed(None)

    def session_closed(self, _: None) -> None:
        """Drops all records; callbacks stay."""
        self._records: dict[int, FollowedLoss] = {}
        self._unread: deque[Unread] = deque()
        self._is_urgent = False  # whether a step must look at these: most are read some at a time
        self._rings: dict[torch.device, LossRing] = {}
        self._seen: dict[int, SeenStep] = {}  # by the id of the AmpOptimizer

    # A call of initialize

    def call_opens(self, opening: Opening) -> None:
        """Begins to follow the losses of a call."""
        limits, call = parse_alarms(opening.request.options["alarms"]), opening.call
        followed = FollowedCall(call, limits, parse_post_mortem(opening.request.options["post_mortem"]))
        for scaler in call.scalers:
            judge = None if limits is None else Judge(limits)
            self._records[scaler.loss_id] = FollowedLoss(scaler, followed, Ring(scaler.loss_id), judge)
            call.undo.callback(self._records.pop, scaler.loss_id, None)
        for amp in opening.amps:
            self._seen[id(amp)] = SeenStep()
        if limits is not None and followed.folder is not None:
            self._watch_forwards(followed, opening)

    def _watch_forwards(self, followed: FollowedCall, opening: Opening) -> None:
        for model in select_python(opening.request.models):
            forward = LastForward()
            opening.call.undo.callback(model.register_forward_pre_hook(forward, with_kwargs=True).remove)
            followed.forwards.append((weakref.ref(model), weakref.ref(forward)))
            params = set(model.parameters())
            for amp in opening.amps:
                if not params.isdisjoint(amp.masters.model_params()):
                    self._seen[id(amp)].forwards.append(weakref.ref(forward))

    # A step

    def block_begins(self, block: ScaledLoss) -> None:
        """Notes the loss of a block at a static scale."""
        if block.scaler.is_dynamic or block.scale.capture is not None or type(block.loss) is not Tensor:
            return
        with torch._C.DisableTorchFunction():
            loss = block.loss.detach()
            loss = loss.sum() if loss.dim() else loss
        for amp in block.optimizers[:1]:
            self._seen[id(amp)].losses[block.scaler.loss_id] = loss

    def step_ended(self, amp: AmpOptimizer) -> None:
        """Notes what led to a step, and judges what the host knows by now; no host sync unless it alarms."""
        seen = self._seen[id(amp)]
        if seen.losses:
            losses, seen.losses = seen.losses, {}
            for loss_id, loss in losses.items():
                self._note_loss(loss_id, loss)
        if amp.last_outcomes:
            self._note_outcomes(amp.last_outcomes)
        if self._is_urgent or OBSERVERS.all:
            self._take_known(wait=False)
        for forward in seen.forwards:
            last = forward()
            if last is not None:
                last.drop()

    def _note_loss(self, loss_id: int, loss: Tensor) -> None:
        record = self._records.get(loss_id)
        if record is not None:
            ring = self._rings.get(loss.device)
            if ring is None:
                ring = self._rings[loss.device] = LossRing(loss.device)
            ring.put((record, record.begun, record.scaler.number), loss)
            record.begun += 1
            self._is_urgent |= bool(ring.sent)

    def _note_outcomes(self, outcomes: Sequence[BackwardOutcome]) -> None:
        """Queues the outcomes of a step by loss; those of two optimizers count once."""
        by_loss: dict[int, list[BackwardOutcome]] = {}
        for outcome in outcomes:
            if not outcome.is_noted:
                outcome.is_noted = True
                self._is_urgent |= not outcome.is_clean()  # asks for it, too
                by_loss.setdefault(outcome.loss_id, []).append(outcome)
        for loss_id, new in by_loss.items():
            record = self._records.get(loss_id)
            if record is not None:
                self._unread.append((record, record.begun, new))
                record.begun += 1
                self._is_urgent |= len(self._unread) >= MOST_UNREAD or not record.is_calm()

    # What the host knows

    def _read(self, *, wait: bool) -> Iterator[tuple[FollowedLoss, ScaleUpdate]]:
        """Yields what has become known, of each loss in order; steps like the one before to observers."""
        unread = self._unread
        if wait or len(unread) >= MOST_UNREAD:
            waiting = [outcome for *_, outcomes in unread for outcome in outcomes]
            if wait or not any(outcome.numbers.is_cuda for outcome in waiting):
                BackwardOutcome.read_all(waiting)
        while unread and all(outcome.is_known() for outcome in unread[0][2]):
            record, step, outcomes = unread.popleft()
            if OBSERVERS.all or not record.count_if_calm(outcomes):
                yield record, _combine(step, outcomes)
        for ring in self._rings.values():
            for (record, step, scale), loss in ring.take(all_of_them=wait):
                is_finite = math.isfinite(loss)
                if OBSERVERS.all or not (is_finite and record.count_clean(scale)):
                    yield record, ScaleUpdate(step, scale, scale, False, is_finite)

    def settle(self) -> None:
        """Takes all that is on its way, and waits for it."""
        self._take_known(wait=True)

    def _take_known(self, *, wait: bool) -> None:
        if self._reading.acquire(blocking=wait):  # else another thread reads, and this step later
            try:
                for record, update in self._read(wait=wait):
                    self._take(record, update)
                self._is_urgent = bool(self._unread) or any(ring.sent for ring in self._rings.values())
            finally:
                self._reading.release()

    def history(self, loss_id: int) -> ScaleHistory:
        """Returns what is known of a loss; waits for what is on its way."""
        with self._reading:
            self.settle()
            record = self._records.get(loss_id)
            return ScaleHistory(loss_id) if record is None else record.ring.history()

    def _take(self, record: FollowedLoss, update: ScaleUpdate) -> None:
        record.ring.note(update)
        OBSERVERS.tell_scale(update, record.scaler.loss_id)
        if record.judge is None:
            return
        kinds = record.judge.take(update, getattr(record.scaler.config, "floor", 0.0))
        if kinds:
            self._raise(record, update, kinds)

    # Alarms

    def _raise(self, record: FollowedLoss, update: ScaleUpdate, kinds: Sequence[str]) -> None:
        """Tells of alarms; whatever goes wrong here, training goes on."""
        try:
            followed, loss_id = record.call, record.scaler.loss_id
            name = name_loss(loss_id, followed.call.scalers[0].loss_id)
            words = {kind: explain_alarm(kind, name, update, followed.limits) for kind in kinds}
            is_off = parse_post_mortem(True) is None  # by the environment
            end = "" if followed.folder is not None or is_off else f". {KEEP}"
            alarms = [
                Alarm(kind, loss_id, update.step, update.scale, text + end) for kind, text in words.items()
            ]
            path = self._write(record, alarms[0])
            for alarm in alarms:
                self._tell(replace(alarm, post_mortem=path), is_logged=bool(followed.call.verbosity))
        except Exception:
            logger.error("an alarm could not be told", exc_info=True)

    def _tell(self, alarm: Alarm, *, is_logged: bool) -> None:
        if is_logged:  # the log may be open for another call
            logger.warning("%s", alarm.message)
        if is_logged and alarm.post_mortem is not None:
            logger.warning("post-mortem: `ampatch doctor --open %s`", alarm.post_mortem)
        for callback in list(self.callbacks.values()):
            try:
                callback(alarm)
            except Exception:
                logger.error("a callback of on_alarm raised; training goes on", exc_info=True)

    def _write(self, record: FollowedLoss, alarm: Alarm) -> Path | None:
        """Writes a post-mortem at the first alarm after a quiet time, on rank 0 and where a loss broke."""
        followed, rank = record.call, find_rank()
        before, record.last_alarm = record.last_alarm, record.begun
        is_same = before is not None and record.begun - before <= followed.limits.within
        if followed.folder is None or is_same or followed.post_mortems >= MOST_POST_MORTEMS:
            return None
        if rank and alarm.kind != "loss":
            return None
        followed.post_mortems += 1
        facts = {name: getattr(alarm, name) for name in ("kind", "loss_id", "step", "scale", "message")}
        facts["steps_later"] = record.begun - 1 - alarm.step  # batch and weights are those of a later step
        history, policy = record.ring.history(), followed.call.policy
        gather = functools.partial(pack, facts, history, policy, followed.live_forwards())
        return write(followed.folder, rank or 0, gather)


def _combine(step: int, outcomes: Sequence[BackwardOutcome]) -> ScaleUpdate:
    """What the passes of one step did to the scale of their loss."""
    numbers = [outcome.read() for outcome in outcomes]
    losses = [outcome.is_loss_finite for outcome in outcomes]
    is_finite = False if False in losses else None if None in losses else True
    skipped = any(overflow for overflow, *_ in numbers)
    return ScaleUpdate(step, numbers[0][1], numbers[-1][2], skipped, is_finite)


# Callbacks are those of the process, as the session is.
ALARMS = AlarmWatch()

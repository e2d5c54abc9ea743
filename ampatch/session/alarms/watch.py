"""Follows the loss scales of a session: keeps their history, raises alarms, and has post-mortems written."""

from __future__ import annotations

import functools
import logging
import math
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Module

from ampatch.models.model import select_python
from ampatch.session.alarms.history import Ring, ScaleHistory, ScaleUpdate
from ampatch.session.alarms.inputs import LastForward, LossRing
from ampatch.session.alarms.judge import Judge
from ampatch.session.alarms.limits import KEEP, Alarm, explain_alarm, name_loss
from ampatch.session.announce import find_rank
from ampatch.session.post_mortem.measure import Underflow, count_underflow
from ampatch.session.post_mortem.pack import pack
from ampatch.session.post_mortem.write import parse_post_mortem, write
from ampatch.steps.outcome import BackwardOutcome
from ampatch.steps.scaler import LossScaler

if TYPE_CHECKING:
    from ampatch.session.inspection import Observer
    from ampatch.session.request import Call
    from ampatch.steps.block import ScaledLoss
    from ampatch.steps.optimizer import AmpOptimizer

logger = logging.getLogger("ampatch")

MOST_UNREAD = 8  # steps whose outcome nobody has read, until they are read together
MOST_POST_MORTEMS = 3  # of one call of `initialize`


@dataclass(slots=True, eq=False)
class Record:
    """What is kept for one loss."""

    scaler: LossScaler
    call: Call
    ring: Ring
    judge: Judge | None
    begun: int = 0  # steps, including those that nobody has read
    last_alarm: int | None = None

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
        is_calm = scale == self.ring.scale and (self.judge is None or self.judge.is_calm)
        self.ring.steps += is_calm
        return is_calm


Unread = tuple[Record, int, Sequence[BackwardOutcome]]  # the outcomes of a step


class AlarmWatch:
    """Notes at each step what became of the loss scale, as soon as the host knows.

    With a dynamic scale that is what the step reads anyway; with an optimizer that skips on the device it
    arrives a little later. Of a static scale only the losses are looked at, some steps later and all at once.
    """

    def __init__(self, observers: Callable[[], Sequence[Observer]]) -> None:
        self._observers = observers
        self.callbacks: OrderedDict[int, Callable[[Alarm], object]] = OrderedDict()
        self._reading = threading.RLock()  # of the thread that reads, whose callbacks may read as well
        self.forget()

    def forget(self) -> None:
        """Drops all records; callbacks stay."""
        self._records: dict[int, Record] = {}
        self._unread: deque[Unread] = deque()
        self._rings: dict[torch.device, LossRing] = {}

    # A call of initialize

    def open(self, call: Call, models: Sequence[Module], amps: Sequence[AmpOptimizer]) -> None:
        """Begins to follow the losses of a call."""
        for scaler in call.scalers:
            judge = None if call.alarms is None else Judge(call.alarms)
            self._records[scaler.loss_id] = Record(scaler, call, Ring(scaler.loss_id), judge)
            call.undo.callback(self._records.pop, scaler.loss_id, None)
        if call.alarms is None or call.folder is None:
            return
        for model in select_python(models):
            forward = LastForward()
            call.undo.callback(model.register_forward_pre_hook(forward, with_kwargs=True).remove)
            call.forwards.append((weakref.ref(model), weakref.ref(forward)))
            params = set(model.parameters())
            for amp in amps:
                if not params.isdisjoint(amp.model_params()):
                    amp.forwards.append(weakref.ref(forward))

    # A step

    def begin_block(self, block: ScaledLoss) -> None:
        """Notes the loss of a block at a static scale."""
        if block.scaler.is_dynamic or block.scale.capture is not None or type(block.loss) is not Tensor:
            return
        with torch._C.DisableTorchFunction():
            loss = block.loss.detach()
            loss = loss.sum() if loss.dim() else loss
        for amp in block.optimizers[:1]:
            amp.losses[block.scaler.loss_id] = loss

    def end_step(self, amp: AmpOptimizer) -> None:
        """Notes what led to a step, and judges what the host knows by now; no host sync unless it alarms."""
        if amp.losses:
            losses, amp.losses = amp.losses, {}
            for loss_id, loss in losses.items():
                self._note_loss(loss_id, loss)
        if amp.last_outcomes:
            self._note_outcomes(amp.last_outcomes)
        self._take_known(amp, wait=False)
        for forward in amp.forwards:
            last = forward()
            if last is not None:
                last.drop()

    def _note_loss(self, loss_id: int, loss: Tensor) -> None:
        record = self._records.get(loss_id)
        if record is not None:
            ring = self._rings.get(loss.device)
            if ring is None:
                ring = self._rings[loss.device] = LossRing(loss.device)
            ring.put((record, record.begun), loss)
            record.begun += 1

    def _note_outcomes(self, outcomes: Sequence[BackwardOutcome]) -> None:
        """Queues the outcomes of a step by loss; those of two optimizers count once."""
        by_loss: dict[int, list[BackwardOutcome]] = {}
        for outcome in outcomes:
            if not outcome.is_noted:
                outcome.is_noted = True
                outcome.is_known()  # asks for it
                by_loss.setdefault(outcome.loss_id, []).append(outcome)
        for loss_id, new in by_loss.items():
            record = self._records.get(loss_id)
            if record is not None:
                self._unread.append((record, record.begun, new))
                record.begun += 1

    # What the host knows

    def _read(self, *, wait: bool) -> Iterator[tuple[Record, ScaleUpdate]]:
        """Yields what has become known, of each loss in order; steps like the one before to observers."""
        unread = self._unread
        if wait or len(unread) >= MOST_UNREAD:
            waiting = [outcome for *_, outcomes in unread for outcome in outcomes]
            if wait or not any(outcome.numbers.is_cuda for outcome in waiting):
                BackwardOutcome.read_all(waiting)
        while unread and all(outcome.is_known() for outcome in unread[0][2]):
            record, step, outcomes = unread.popleft()
            if self._observers() or not record.count_if_calm(outcomes):
                yield record, _combine(step, outcomes)
        for ring in self._rings.values():
            for (record, step), loss in ring.take(all_of_them=wait):
                scale, is_finite = record.scaler.number, math.isfinite(loss)
                if self._observers() or not (is_finite and record.count_clean(scale)):
                    yield record, ScaleUpdate(step, scale, scale, False, is_finite)

    def settle(self) -> None:
        """Takes all that is on its way, and waits for it."""
        self._take_known(None, wait=True)

    def _take_known(self, amp: AmpOptimizer | None, *, wait: bool) -> None:
        if self._reading.acquire(blocking=wait):  # else another thread reads, and this step later
            try:
                for record, update in self._read(wait=wait):
                    self._take(record, update, amp)
            finally:
                self._reading.release()

    def history(self, loss_id: int) -> ScaleHistory:
        """Returns what is known of a loss; waits for what is on its way."""
        with self._reading:
            self.settle()
            record = self._records.get(loss_id)
            return ScaleHistory(loss_id) if record is None else record.ring.history()

    def _take(self, record: Record, update: ScaleUpdate, amp: AmpOptimizer | None) -> None:
        record.ring.note(update)
        for observer in self._observers():
            observer.on_scale(update, record.scaler.loss_id)
        if record.judge is None:
            return
        kinds = record.judge.take(update, getattr(record.scaler.config, "floor", 0.0))
        if kinds:
            self._raise(record, update, kinds, amp)

    # Alarms

    def _raise(
        self, record: Record, update: ScaleUpdate, kinds: Sequence[str], amp: AmpOptimizer | None
    ) -> None:
        """Tells of alarms; whatever goes wrong here, training goes on."""
        try:
            call, loss_id = record.call, record.scaler.loss_id
            found = None if amp is None or "low" not in kinds else _look_closer(amp, update)
            name = name_loss(loss_id, call.scalers[0].loss_id)
            words = {kind: explain_alarm(kind, name, update, call.alarms, found) for kind in kinds}
            is_off = parse_post_mortem(True) is None  # by the environment
            end = "" if call.folder is not None or is_off else f". {KEEP}"
            alarms = [
                Alarm(kind, loss_id, update.step, update.scale, text + end) for kind, text in words.items()
            ]
            path = self._write(record, alarms[0])
            for alarm in alarms:
                self._tell(replace(alarm, post_mortem=path), is_logged=bool(call.verbosity))
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

    def _write(self, record: Record, alarm: Alarm) -> Path | None:
        """Writes a post-mortem at the first alarm after a quiet time, on rank 0 and where a loss broke."""
        call, rank = record.call, find_rank()
        before, record.last_alarm = record.last_alarm, record.begun
        is_same = before is not None and record.begun - before <= call.alarms.within
        if call.folder is None or is_same or call.post_mortems >= MOST_POST_MORTEMS:
            return None
        if rank and alarm.kind != "loss":
            return None
        call.post_mortems += 1
        facts = {name: getattr(alarm, name) for name in ("kind", "loss_id", "step", "scale", "message")}
        facts["steps_later"] = record.begun - 1 - alarm.step  # batch and weights are those of a later step
        history, models = record.ring.history(), call.live_forwards()
        return write(call.folder, rank or 0, functools.partial(pack, facts, history, call.policy, models))


def _combine(step: int, outcomes: Sequence[BackwardOutcome]) -> ScaleUpdate:
    """What the passes of one step did to the scale of their loss."""
    numbers = [outcome.read() for outcome in outcomes]
    losses = [outcome.is_loss_finite for outcome in outcomes]
    is_finite = False if False in losses else None if None in losses else True
    skipped = any(overflow for overflow, *_ in numbers)
    return ScaleUpdate(step, numbers[0][1], numbers[-1][2], skipped, is_finite)


def _look_closer(amp: AmpOptimizer, update: ScaleUpdate) -> Underflow | None:
    """Counts the gradients of a step that are lost at its scale; some host syncs."""
    halves = [(pair.half.grad, 1.0) for pair in amp.masters if pair.half.grad is not None]
    own = [(param.grad, update.scale) for param in amp.own_params() if param.grad is not None]
    return count_underflow([*halves, *own])

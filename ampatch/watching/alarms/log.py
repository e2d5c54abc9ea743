"""What loss scales go through, for users: their history, who is told of alarms, and logs in TensorBoard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol, cast

from torch.utils.hooks import RemovableHandle

from ampatch.errors import AmpError, AmpTypeError, AmpValueError
from ampatch.levels.ranks import find_rank
from ampatch.session.frontend import cast_counts, loss_scalers, pick_scaler
from ampatch.session.session import SESSION
from ampatch.watching.alarms.history import Alarm, ScaleHistory, ScaleUpdate
from ampatch.watching.alarms.watch import ALARMS
from ampatch.watching.observers import Observer, observe

logger = logging.getLogger("ampatch")


def history(loss_id: int = 0) -> ScaleHistory:
    """Returns what happened to a loss scale: skipped steps, falls, growths, losses that were not finite.

    ```python
    for update in amp.history():
        print(update.step, update.scale, update.skipped)
    ```

    Losses are numbered across calls of `initialize`; if all of them are disabled, it is empty. Costs one
    host sync if something is still on its way. Not part of `state_dict`. Raises NotInitializedError before
    `initialize`, and AmpValueError or AmpTypeError for a number that no loss has.
    """
    scalers = loss_scalers()
    return ALARMS.history(pick_scaler(scalers, loss_id).loss_id) if scalers else ScaleHistory(loss_id)


def on_alarm(callback: Callable[[Alarm], object]) -> RemovableHandle:
    """Calls a function with each `Alarm` that is raised, until `remove()` of the returned handle is called.

    ```python
    handle = amp.on_alarm(lambda alarm: send_mail(str(alarm)))
    ```

    It runs inside of the step that raised the alarm, on each rank. What it raises is logged, and training
    goes on. It outlives `uninitialize`, and may be given before `initialize`.
    """
    if not callable(callback):
        raise AmpTypeError(f"on_alarm({callback!r}): expected a function that takes an amp.Alarm")
    removal = RemovableHandle(ALARMS.callbacks)
    ALARMS.callbacks[removal.id] = callback
    return removal


class ScalarWriter(Protocol):
    """What writes a number under a name, as the SummaryWriter of TensorBoard does."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Writes one."""


def log_to(
    target: ScalarWriter | Callable[[dict[str, float], int], object],
    every: int = 1,
    *,
    first_step: int = 0,
    casts: bool = False,
) -> ExitStack:
    """Logs loss scales and skipped steps to TensorBoard, or calls a function with them.

    ```python
    amp.log_to(SummaryWriter("runs/first"))
    amp.log_to(lambda values, step: print(step, values))
    ```

    The function takes a dict and the step number, as `log` of W&B and `log_metrics` of MLflow do. For each
    step of loss 0 the dict has `amp/loss_scale/0`, what `get_loss_scale()` is after the step, and
    `amp/skipped_steps/0`, how many were skipped since the log began. Other losses have their own number and
    count their own steps, as in `history`.

    - `every`: logs each Nth step of a loss, from the first on.
    - `first_step`: the number of the first step, where a script resumes.
    - `casts`: adds `amp/casts_made/0` and `amp/casts_reused/0`, those of the session (see `CastCounts`) by
      then. Call it before `initialize`; costs 0.2 µs a cast.

    No host sync at a step: a step is logged as soon as the host knows what became of it, which is up to eight
    steps later at a static scale or with an optimizer that skips on the device. `uninitialize` and the end of
    the log read what is left, by one host sync.

    `close()` of what it returns ends the log, as does the end of a `with` block. Otherwise it goes on after
    `uninitialize`, and it may begin before `initialize`. Rank 0 alone logs. What the target raises is
    logged once, and training goes on. Raises AmpTypeError and AmpValueError for arguments that cannot work,
    and AmpError for `casts=True` where torch's functions are patched already.
    """
    if not (hasattr(target, "add_scalar") or callable(target)):
        raise AmpTypeError(
            f"log_to({target!r}): expected a SummaryWriter, or a function that takes a dict and a step number"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise AmpValueError(f"log_to: every is {every!r}: expected a whole number of steps, 1 or more")
    if casts and SESSION.casts.half is not None and SESSION.torch_patch.counter is None:
        raise AmpError(
            "log_to(casts=True) came after initialize, whose casts are not counted: call it before"
        )
    log = Log(target, every, first_step, casts)
    stack = ExitStack()
    stack.enter_context(observe(log))
    stack.callback(log.on_uninitialize)
    return stack


class Log(Observer):
    """Writes what became of the steps of each loss."""

    def __init__(self, target: object, every: int, first_step: int, casts: bool) -> None:
        self.counts_casts = casts
        self._target = target
        self._every, self._first_step = every, first_step
        self._skipped: Counter[int] = Counter()
        self._has_failed = False

    def on_scale(self, update: ScaleUpdate, loss_id: int) -> None:
        """Writes a step, on rank 0."""
        self._skipped[loss_id] += update.skipped
        if update.step % self._every or find_rank():
            return
        values = {"loss_scale": update.next_scale, "skipped_steps": float(self._skipped[loss_id])}
        if self.counts_casts:
            counts = cast_counts()
            values |= {"casts_made": float(counts.made), "casts_reused": float(counts.reused)}
        self._write(
            {f"amp/{name}/{loss_id}": value for name, value in values.items()},
            self._first_step + update.step,
        )

    def on_uninitialize(self) -> None:
        """Writes the steps that nobody has read yet."""
        ALARMS.settle()

    def _write(self, values: dict[str, float], step: int) -> None:
        try:
            if hasattr(self._target, "add_scalar"):
                for name, value in values.items():
                    self._target.add_scalar(name, value, step)
            else:
                cast("Callable[..., object]", self._target)(values, step)
        except Exception:
            if not self._has_failed:
                logger.error(
                    "what log_to was given raised; training goes on, and no more is said of it", exc_info=True
                )
            self._has_failed = True

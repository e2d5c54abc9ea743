"""The public functions: the history of a loss scale, and who is told of alarms."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

from ampatch.errors import AmpTypeError
from ampatch.session.alarms.history import ScaleHistory
from ampatch.session.alarms.words import Alarm
from ampatch.session.scalers import loss_scalers, pick_scaler
from ampatch.session.session import SESSION


def history(loss_id: int = 0) -> ScaleHistory:
    """Returns what a loss scale went through: skipped steps, falls, growths, losses that were not finite.

    ```python
    for update in amp.history():
        print(update.step, update.scale, update.skipped)
    ```

    Losses are numbered across calls of `initialize`; where all of them are disabled it is empty. Costs one
    host sync if something is still on its way. Not part of `state_dict`. Raises NotInitializedError before
    `initialize`, and AmpValueError or AmpTypeError for a number that no loss has.
    """
    scalers = loss_scalers()
    return SESSION.alarms.history(pick_scaler(scalers, loss_id).loss_id) if scalers else ScaleHistory(loss_id)


def on_alarm(callback: Callable[[Alarm], object]) -> RemovableHandle:
    """Has a function called with each `Alarm` that is raised; `remove()` of what it returns ends that.

    ```python
    handle = amp.on_alarm(lambda alarm: send_mail(str(alarm)))
    ```

    It runs inside of the step that raised the alarm, on each rank. What it raises is logged, and training
    goes on. It outlives `uninitialize`, and may be given before `initialize`.
    """
    if not callable(callback):
        raise AmpTypeError(f"on_alarm({callback!r}): expected a function that takes an amp.Alarm")
    removal = RemovableHandle(SESSION.alarms.callbacks)
    SESSION.alarms.callbacks[removal.id] = callback
    return removal

"""When an alarm is raised, by the limits that `initialize(alarms=...)` takes, and what it says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from ampatch.errors import AmpTypeError, AmpValueError
from ampatch.levels.loss_scale import is_number
from ampatch.session.alarms.history import ScaleUpdate


@dataclass(frozen=True, slots=True)
class Alarms:
    """Describes when an alarm is raised about a loss; None switches one kind off.

    ```python
    amp.initialize(model, optimizer, alarms=amp.Alarms(skipped=10, scale_below=None))
    ```

    - `"loss"` (with `loss`): the loss is inf or NaN.
    - `"skipped"`: so many steps in a row were skipped.
    - `"falls"`: the scale fell so many times `within` so many steps; steps skipped in a row count as one.
    - `"low"`: the scale fell below `scale_below`, where small gradients become 0 in float16.
    - `"minimum"` (with `minimum`): gradients overflow, and the scale may fall no further.

    Each is raised once, and again only after `within` steps in which it had no reason. A dynamic scale looks
    for its size in the first steps, and after each growth: overflows of that search are not counted, until
    the scale is below 128. Steps are counted for each loss, from 0.

    Raises AmpTypeError and AmpValueError for limits that cannot work, all of them at once.
    """

    loss: bool = True
    skipped: int | None = 5
    falls: int | None = 5
    within: int = 1000
    scale_below: float | None = 128.0
    minimum: bool = True

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)!r}: expected a whole number, 1 or more"
            for name in ("skipped", "falls", "within")
            if not _is_count(getattr(self, name), optional=name != "within")
        ]
        if self.scale_below is not None and not (is_number(self.scale_below) and self.scale_below > 0):
            wrong.append(f"scale_below={self.scale_below!r}: expected a number above 0, or None")
        if wrong:
            raise AmpValueError("Alarms: " + "; ".join(wrong))


def _is_count(value: object, *, optional: bool) -> bool:
    if value is None:
        return optional
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def parse_alarms(value: object) -> Alarms | None:
    """Reads what a user may pass as `alarms`: limits, True for the usual ones, None or False for none."""
    if value is None or value is False:
        return None
    if value is True:
        return Alarms()
    if not isinstance(value, Alarms):
        names = ", ".join(one.name for one in fields(Alarms))
        raise AmpTypeError(f"alarms is {value!r}: expected an amp.Alarms({names}), or None for no alarms")
    return value


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that goes wrong with a loss: what `on_alarm` passes to callbacks.

    `kind` is "loss", "skipped", "falls", "low" or "minimum" (see `Alarms`), `step` that of the loss, from 0,
    `scale` what it was scaled by, `message` a sentence for people. `post_mortem` is the file that was
    written, None if there is none.
    """

    kind: str
    loss_id: int
    step: int
    scale: float
    message: str
    post_mortem: Path | None = None

    def __str__(self) -> str:
        return self.message


FIND = "`ampatch doctor` finds the line"
KEEP = "With initialize(post_mortem=True) the first alarm writes a post-mortem for `ampatch doctor --open`"
SENTENCES = {
    "loss": f"the loss is inf or NaN before it is scaled: no loss scale helps. {FIND}",
    "skipped": (
        f"{{limits.skipped}} steps in a row were skipped, and the loss scale has fallen to "
        f"{{update.next_scale:g}}: a gradient overflows again and again. {FIND}"
    ),
    "falls": (
        f"the loss scale fell {{limits.falls}} times within {{limits.within}} steps, now to "
        f"{{update.next_scale:g}}: a gradient overflows now and then. {FIND}"
    ),
    "low": (
        "the loss scale fell to {update.next_scale:g}, below {limits.scale_below:g}: small gradients are 0 "
        "in float16{detail}. Keep the layer that overflows in float32, or take bfloat16 (O4, O5)"
    ),
    "minimum": (
        f"gradients overflow at a loss scale of {{update.next_scale:g}}, the least allowed, and steps "
        f"are skipped. Lower min_loss_scale, or keep the layer in float32. {FIND}"
    ),
}


def explain_alarm(kind: str, name: str, update: ScaleUpdate, limits: Alarms, detail: object = None) -> str:
    """Says what an alarm is about, and what to do; `detail` is what was found at a closer look."""
    told = "" if detail is None else f" ({detail})"
    sentence = SENTENCES[kind].format(update=update, limits=limits, detail=told)
    return f"{name}, step {update.step}: {sentence}"


def name_loss(loss_id: int, first: int) -> str:
    """Names a loss as `scale_loss` knows it; `first` is the number that `history` has for its call's first.

    >>> name_loss(2, 0), name_loss(2, 1)
    ('loss 2', 'loss 1 of a later call (amp.history(2))')
    """
    return f"loss {loss_id - first}" + (f" of a later call (amp.history({loss_id}))" if first else "")

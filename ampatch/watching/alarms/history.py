"""What a loss scale went through, and what is said of it: updates, kept in a ring, and alarms."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from ampatch.levels.loss_scale import Alarms

MOST_UPDATES = 512


@dataclass(frozen=True, slots=True)
class ScaleUpdate:
    """What a step did to a loss scale.

    `step` counts the steps with this loss, from 0. `scale` is what its gradients were scaled by, `next_scale`
    what those of the next step are. `skipped`: they overflowed, and the step was skipped; a static scale
    looks at no gradients and skips nothing. `loss_is_finite` is None where nobody knows, as with
    `delay_unscale`.
    """

    step: int
    scale: float
    next_scale: float
    skipped: bool = False
    loss_is_finite: bool | None = True

    @property
    def is_event(self) -> bool:
        """Whether anything happened in the step: it was skipped, the scale moved, or the loss broke."""
        return self.skipped or self.loss_is_finite is False or self.next_scale != self.scale


@dataclass(frozen=True, slots=True)
class ScaleHistory(Sequence[ScaleUpdate]):
    """The steps in which something happened to a loss scale, the oldest first; the latest 512 of them.

    Those are the first step, each that was skipped, at which the scale moved (or before which somebody set
    it), or whose loss was inf or NaN. `steps` and `skipped` count all steps, `forgotten` the updates that
    are no longer here.
    """

    loss_id: int
    updates: tuple[ScaleUpdate, ...] = ()
    steps: int = 0
    skipped: int = 0
    forgotten: int = 0

    @overload
    def __getitem__(self, index: int) -> ScaleUpdate: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ScaleUpdate, ...]: ...
    def __getitem__(self, index: int | slice) -> ScaleUpdate | tuple[ScaleUpdate, ...]:
        return self.updates[index]

    def __len__(self) -> int:
        return len(self.updates)

    def __str__(self) -> str:
        lines = [f"loss {self.loss_id}: {self.skipped} of {self.steps} steps were skipped"]
        if self.forgotten:
            lines.append(f"  ... {self.forgotten} earlier updates are forgotten")
        return "\n".join([*lines, *(f"  step {update.step}: {describe_update(update)}" for update in self)])


def describe_update(update: ScaleUpdate) -> str:
    """Says what an update did, such as `skipped at 65536, then 32768`."""
    words = ["skipped at" if update.skipped else "scale", f"{update.scale:g}"]
    moved = f", then {update.next_scale:g}" if update.next_scale != update.scale else ""
    return " ".join(words) + moved + (", loss not finite" if update.loss_is_finite is False else "")


class Ring:
    """Keeps the latest updates of one loss, and counts all."""

    def __init__(self, loss_id: int) -> None:
        self.loss_id = loss_id
        self.steps = self.skipped = self._noted = 0
        self.scale = math.nan  # what the next step scales by, as far as is known
        self._updates: deque[ScaleUpdate] = deque(maxlen=MOST_UPDATES)

    def note(self, update: ScaleUpdate) -> None:
        """Counts a step, and keeps it if anything happened."""
        self.steps = update.step + 1
        self.skipped += update.skipped
        if update.is_event or update.scale != self.scale:
            self._noted += 1
            self._updates.append(update)
        self.scale = update.next_scale

    def history(self) -> ScaleHistory:
        """Returns what is kept."""
        kept = tuple(self._updates)
        return ScaleHistory(self.loss_id, kept, self.steps, self.skipped, self._noted - len(kept))


# ---- Alarms: what is wrong with a loss, and what to do, in words ----


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
        "in float16. Keep the layer that overflows in float32, or take bfloat16 (O4, O5)"
    ),
    "minimum": (
        f"gradients overflow at a loss scale of {{update.next_scale:g}}, the least allowed, and steps "
        f"are skipped. Lower min_loss_scale, or keep the layer in float32. {FIND}"
    ),
}


def explain_alarm(kind: str, name: str, update: ScaleUpdate, limits: Alarms) -> str:
    """Says what an alarm is about, and what to do."""
    return f"{name}, step {update.step}: {SENTENCES[kind].format(update=update, limits=limits)}"


def name_loss(loss_id: int, first: int) -> str:
    """Names a loss as `scale_loss` knows it; `first` is the number that `history` has for its call's first.

    >>> name_loss(2, 0), name_loss(2, 1)
    ('loss 2', 'loss 1 of a later call (amp.history(2))')
    """
    return f"loss {loss_id - first}" + (f" of a later call (amp.history({loss_id}))" if first else "")

"""One alarm: what is wrong with a loss, and what to do, in words."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ampatch.levels.loss_scale import Alarms
from ampatch.watching.alarms.history import ScaleUpdate


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

"""What the library says of its own loss scale: the misuse that it warns of, and blocks of `scale_loss`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

import ampatch as amp
from ampatch.doctor.instruments.places import SHOWN, user_line
from ampatch.doctor.silent.fault import Notes

# What the library warns of, by its names of misuse: the fault and the operation.
MISUSE = {
    "clipping": ("clipped_while_scaled", "clip_grad"),
    "inside": ("unscaled_backward", "backward"),
    "outside": ("unscaled_backward", "backward"),
    "late": ("late_backward", "backward"),
    "unnamed": ("unnamed_optimizer", "scale_loss"),
    "GradScaler": ("two_scalers", "step"),
    "ignored": ("ignored_edits", "step"),
    "halved": ("half_after_initialize", "half"),
    "stranger": ("unknown_optimizer", "step"),
}


def listen_to_library(notes: Notes, count_backwards: Callable[[], int], undo: ExitStack) -> None:
    """Notes the faults that the library sees, until undone."""
    warned, logger = Warned(notes), logging.getLogger("ampatch")
    logger.addFilter(warned)
    undo.callback(logger.removeFilter, warned)
    undo.enter_context(amp.observe(Blocks(notes, count_backwards)))


class Warned(logging.Filter):
    """Notes what the library warns of, before the session's own filter silences it at verbosity 0."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes = notes

    def filter(self, record: logging.LogRecord) -> bool:
        """Reads a line of the log, file, number and text, and lets it pass."""
        found = MISUSE.get(getattr(record, "misuse", ""))
        if found is not None:
            file, number, text = record.args
            where = f"{str(file).removeprefix(SHOWN)}:{number}"
            self._notes.add(found[0], "optimizer", where, found[1], said=text)
        return True


class Blocks(amp.Observer):
    """Notes blocks of `scale_loss` without a backward pass."""

    def __init__(self, notes: Notes, count: Callable[[], int]) -> None:
        self._notes, self._count = notes, count
        self._open: dict[int, tuple[int, str | None]] = {}

    def on_loss(self, loss: Tensor, loss_id: int) -> None:
        """A block begins."""
        self._open[loss_id] = self._count(), user_line()

    def on_backward(self, loss_id: int) -> None:
        """It ends."""
        backwards, where = self._open.pop(loss_id, (-1, None))
        if backwards == self._count():
            self._notes.add("scaled_not_backpropagated", "loss", where, "scale_loss")

"""What the library says of its own loss scale: the misuse that it warns of, and blocks of `scale_loss`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

from torch import Tensor

import ampatch as amp
from ampatch.doctor.instruments.places import SHOWN, user_line
from ampatch.doctor.silent.fault import Notes

# What the library warns of, by words of its message.
WARNINGS = (
    ("are clipped at", "clipped_while_scaled", "clip_grad"),
    ("backward() in a block", "unscaled_backward", "backward"),
    ("backward() outside of scale_loss", "unscaled_backward", "backward"),
    ("a GradScaler steps", "two_scalers", "step"),
)


def listen_to_library(notes: Notes, count_backwards: Callable[[], int], undo: ExitStack) -> None:
    """Notes the faults that the library sees, until undone."""
    warned, logger = Warned(notes), logging.getLogger("ampatch")
    logger.addHandler(warned)
    undo.callback(logger.removeHandler, warned)
    undo.enter_context(amp.observe(Blocks(notes, count_backwards)))


class Warned(logging.Handler):
    """Notes what the library warns of."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        """Reads a line of the log: file, number and text."""
        if not isinstance(record.args, tuple) or len(record.args) != 3:
            return
        file, number, text = record.args
        for words, kind, op in WARNINGS:
            if words in str(text):
                self._notes.add(kind, "optimizer", f"{str(file).removeprefix(SHOWN)}:{number}", op, said=text)


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

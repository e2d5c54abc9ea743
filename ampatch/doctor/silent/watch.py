"""Watches runs for silent faults: the scale in all of the run, operations in its first attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor
from torch.optim import Optimizer

from ampatch.doctor.instruments.clock import Clock
from ampatch.doctor.instruments.dispatch import Operation, Rule
from ampatch.doctor.instruments.operations import IGNORED
from ampatch.doctor.instruments.values import floating_in
from ampatch.doctor.instruments.watch import Attempt
from ampatch.doctor.silent.coarse import Counts, Updates
from ampatch.doctor.silent.fault import Notes
from ampatch.doctor.silent.gradients import Ranges
from ampatch.doctor.silent.rules import Casts, Float8, Lengths, Reads
from ampatch.doctor.silent.scaled import Scaled
from ampatch.doctor.silent.shadows import Shadows
from ampatch.levels.private import is_transformed

FIRST = 16  # attempts whose operations are watched
LEFT_ALONE = (*IGNORED[1:], "untyped_storage", "data_ptr", "zeros_like", "full_like")  # but not properties


class Silent(Rule):
    """Holds what is found; shows operations of the first attempts, and of `window`, to rules."""

    def __init__(self, clock: Clock, window: Collection[int] = ()) -> None:
        self.notes = notes = Notes(clock)
        self._scaled, self._ranges = Scaled(clock, notes), Ranges(clock)
        super().__init__(clock)
        self._window = {*range(FIRST), *window}
        self._shadows, self._casts = Shadows(notes), Casts(clock, notes)
        self._updates = Updates(clock, notes)
        lookers = Reads(notes, self._scaled), Lengths(notes), Float8(notes), Counts(notes)
        self._rules = self._casts, self._updates, *lookers

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Tells of what the loss comes of."""
        if self._is_active:
            self._shadows.begin_backward(losses)

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        """Looks at the weights that are stepped."""
        if self._is_active:
            self._updates.begin_attempt(optimizer)

    def end_attempt(self, optimizer: Optimizer) -> None:
        """The next attempt begins."""
        if self._is_active:
            self._casts.end_attempt()
            self._updates.end_attempt()
        for rule in (self._shadows, *self._rules):
            rule.forget()

    @property
    def _is_active(self) -> bool:
        return self.clock.attempt in self._window

    def wants(self, name: str) -> bool:
        """Leaves out the operations of backward passes and optimizers."""
        is_away = self.clock.in_backward or self.clock.part == "optimizer"
        return self._is_active and not (is_away or name in LEFT_ALONE or is_transformed())

    def before(self, operation: Operation) -> Operation | None:
        """Returns what may be repeated."""
        return self._shadows.prepare(operation)

    def after(self, operation: Operation, kept: Operation | None, result: object) -> None:
        """Looks at what an operation gives, in place where it returns nothing, as x[mask] = 0."""
        given = floating_in(result)
        if operation.name.endswith("_") and operation.args and not given:
            given = floating_in(operation.args[0])
        if given:
            self._shadows.look(operation, kept, given)
            for rule in self._rules:
                rule.look(operation, given)

    def to_json(self) -> dict[str, object]:
        """Returns what was found, once the run is over."""
        self._scaled.close()
        return {"faults": self.notes.to_json(), "ranges": self._ranges.to_json()}


def plan_window(attempts: Sequence[Attempt], sample: int | None) -> tuple[int, ...]:
    """Returns attempts up to which a traced run goes on for silent faults: not beyond weights that broke."""
    first = attempts[:FIRST]
    last = next((index for index, attempt in enumerate(first) if not attempt.weights), len(first) - 1)
    return tuple(index for index in (last, sample) if index is not None and index >= 0)

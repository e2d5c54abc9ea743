"""Watches runs for silent faults: the scale in all of the run, operations in its first attempts."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from torch import Tensor
from torch.amp import GradScaler
from torch.nn import Module
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ampatch.doctor.instruments.clock import Listener, listen
from ampatch.doctor.instruments.operations import IGNORED, name_of
from ampatch.doctor.instruments.places import Models, user_line
from ampatch.doctor.instruments.values import floating_in, quiet
from ampatch.doctor.silent.fault import Notes
from ampatch.doctor.silent.gradients import Ranges, Sample
from ampatch.doctor.silent.rules import Casts, Lengths, Reads
from ampatch.doctor.silent.scaled import Scaled
from ampatch.doctor.silent.shadows import Operation, Shadows
from ampatch.levels.private import is_transformed

FIRST = 16  # attempts whose operations are watched
LEFT_ALONE = (*IGNORED[1:], "untyped_storage", "data_ptr", "zeros_like", "full_like")  # but not properties


class Silent(Listener):
    """Counts the attempts, and holds what is found."""

    def __init__(self) -> None:
        self.notes, self._ranges = Notes(), Ranges()
        self._scaled = Scaled(self.notes)

    def open(
        self, undo: ExitStack, window: Collection[int] | None = None, sample: Sample | None = None
    ) -> None:
        """Watches until undone; operations as well, in the first attempts and `window`, unless it is None."""
        for listener in (self._scaled, self._ranges, sample):
            if listener is not None:
                listener.open(undo)
                listen(listener, undo)
        if window is not None:
            operations = Operations(self.notes, self._scaled, {*range(FIRST), *window})
            operations.open(undo)
            listen(operations, undo)
            undo.enter_context(operations)
        listen(self, undo)

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Counts; the last to be told."""
        self.notes.attempt += 1

    def to_json(self) -> dict[str, object]:
        """Returns what was found, once the run is over."""
        self._scaled.close()
        return {"faults": self.notes.to_json(), "ranges": self._ranges.to_json()}


class Operations(TorchFunctionMode, Listener):
    """Shows the operations of some attempts, but for those of backward passes and optimizers, to rules."""

    def __init__(self, notes: Notes, scaled: Scaled, window: Collection[int]) -> None:
        super().__init__()
        self._notes, self._window, self._models = notes, window, Models()
        self._shadows, self._casts = Shadows(notes), Casts(notes)
        self._reads, self._lengths = Reads(notes, scaled), Lengths(notes)
        self._phase, self._is_away = "input", False

    def open(self, undo: ExitStack) -> None:
        """Replaces what rules need, until undone."""
        self._casts.open(undo)

    # ---- The parts of a step ----

    def enter_module(self, module: Module, args: tuple) -> None:
        """Follows the modules."""
        if not self._is_away:
            self._phase = "loss" if self._models.enter(module) else self._phase
            self._casts.inside.append(module)

    def leave_module(self, module: Module) -> None:
        """Follows the modules."""
        if not self._is_away:
            self._models.leave()
            del self._casts.inside[-1:]

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Tells of what the loss comes of."""
        self._is_away = True
        if self._is_active:
            with quiet():
                self._shadows.begin_backward(losses)

    def end_backward(self) -> None:
        """The next micro-step begins."""
        self._is_away, self._phase = False, "input"
        self._models.forget_calls()
        self._casts.inside.clear()

    def begin_attempt(self, optimizer: Optimizer, scaler: GradScaler | None) -> None:
        """The optimizer's own operations follow."""
        self._is_away = True

    def end_attempt(self, optimizer: Optimizer) -> None:
        """The next attempt begins."""
        if self._is_active:
            self._casts.end_attempt()
        self._is_away, self._phase = False, "input"
        for rule in (self._shadows, self._casts, self._reads, self._lengths):
            rule.forget()

    @property
    def _is_active(self) -> bool:
        return self._notes.attempt in self._window

    # ---- Operations ----

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        if self._is_away or not self._is_active or name in LEFT_ALONE or is_transformed():
            return func(*args, **kwargs)
        with quiet():
            operation = self._describe(name, func, args, kwargs)
            repeated = self._shadows.prepare(operation)
        result = func(*args, **kwargs)
        with quiet():
            given = floating_in(result)
            if name.endswith("_") and args and not given:  # as x[mask] = 0
                given = floating_in(args[0])
            if given:
                self._shadows.look(operation, repeated, given)
                for rule in (self._casts, self._reads, self._lengths):
                    rule.look(operation, given)
        return result

    def _describe(self, name: str, func, args: tuple, kwargs: dict) -> Operation:
        phase = "forward" if self._models.is_inside else self._phase
        return Operation(
            *(name, func, args, kwargs, floating_in((args, kwargs))),
            *(phase, self._models.place, user_line()),
        )

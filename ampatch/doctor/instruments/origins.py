"""The operations of a run that made bad numbers."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from ampatch.doctor.instruments.operations import CASTS, Origin
from ampatch.doctor.instruments.places import Place
from ampatch.doctor.instruments.region import statement_of_zeros
from ampatch.doctor.instruments.tape import Op
from ampatch.doctor.instruments.values import Damage, examine, is_mask

HARMLESS = (*CASTS, "detach")  # which make NaN of nothing


class Origins:
    """All of a run, in the order of their appearance; marks are their indices."""

    def __init__(self) -> None:
        self.all: list[Origin] = []
        self.attempt = self.micro_step = 0
        self.batch_sizes: tuple[int, ...] = ()
        self.is_repeat = False  # a checkpoint runs operations again
        self.asked: set[int] = set()  # those of what the script asked about
        self.came_back: set[int] = set()  # those seen in a backward pass, until a gradient is bad
        self.quiet: set[int] = set()  # infinities in the data, which may reach nothing

    def add(self, call: Op, damage: Damage, **more: object) -> int:
        """Notes an origin, and returns its mark; one that is repeated is noted already."""
        more |= {"attempt": self.attempt, "batch_sizes": self.batch_sizes}
        origin = Origin(call, call.phase, damage, self.micro_step, **more)
        for index, known in enumerate(self.all) if self.is_repeat else ():
            if origin.identity == known.identity:
                return index
        self.all.append(origin)
        return len(self.all) - 1

    def add_unseen(self, tensor: Tensor, name: str | None, where: str | None, is_first: bool) -> int:
        """Notes bad numbers that no operation made: those of a weight that has a name, or of the data."""
        if tensor.dim() and name is None:
            self.batch_sizes = self.batch_sizes or (tensor.shape[0],)
        call = Op("", "input" if name is None or is_first else "optimizer", None, where)
        return self.add(call, examine(tensor), parameter=name)

    def add_data(self, tensor: Tensor, place: Place | None, where: str | None) -> set[int]:
        """Notes what is bad in what a model is given; a mask, which holds nothing but 0 and -inf, is not."""
        if is_mask(tensor):
            return set()
        mark = self.add(Op("", "input", place, where), damage := examine(tensor))
        if damage.kind == "inf":
            self.quiet.add(mark)
        return {mark}

    def reach(self, marks: Collection[int]) -> None:
        """Notes that origins have reached a loss, a gradient or a weight."""
        for index in marks:
            self.all[index].has_reached = True

    def give_up(self) -> None:
        """A script that saw bad numbers and made no backward pass of them has left them out."""
        self.reach(self.asked)
        self.asked = set()

    def note_turn(self, call: Op, damage: Damage, marks: Collection[int]) -> None:
        """Notes what makes NaN of an infinity, and of which sample: that may be another than the first."""
        self.note_taken(marks, call.phase)
        in_batch = bool(damage.element) and damage.shape[0] in self.batch_sizes
        for origin in (self.all[index] for index in marks):
            is_told = call.op not in HARMLESS and not call.op.startswith("_")
            if origin.damage.kind == "inf" and origin.turns is None and is_told:
                origin.turns = call.op, call.where, damage.element[0] if in_batch else None

    def of(self, phase: str, marks: Collection[int]) -> list[Origin]:
        """Returns those of some marks that are of a phase: "input" before the model, "loss" after it."""
        return [self.all[index] for index in marks if self.all[index].phase == phase]

    def note_taken(self, marks: Collection[int], phase: str) -> None:
        """Notes the first statement behind the data that takes what is bad there, and how it takes 0."""
        for call in (it.call for it in self.of("input", marks) if phase != "input"):
            if "taken" not in call.facts:
                call.facts["taken"] = statement_of_zeros()

    def move_to_step(self, marks: Collection[int], name: str | None) -> bool:
        """What is done to the gradient of a parameter after its backward pass is no part of the next input.

        Says whether there are marks.
        """
        for origin in self.of("input", marks):
            if origin.attempt == self.attempt and origin.micro_step > self.micro_step:
                origin.phase, origin.micro_step, origin.parameter = "optimizer", self.micro_step, name
        return bool(marks)

    def move_to_loss(self) -> None:
        """What a script without a model does before the backward pass is its loss."""
        now = (self.attempt, self.micro_step, "input")
        for origin in self.all:
            if (origin.attempt, origin.micro_step, origin.phase) == now and origin.call.op:
                origin.phase = "loss"

    def end_attempt(self) -> None:
        """The sizes of the batch are known now."""
        for origin in self.all:
            if origin.attempt == self.attempt:
                origin.batch_sizes = origin.batch_sizes or self.batch_sizes
        self.attempt, self.micro_step = self.attempt + 1, 0

"""Which bad numbers a tensor comes of: marks of origins, by the memory that it lies in."""

from __future__ import annotations

from torch import Tensor

from ampatch.doctor.instruments.values import key_of


class Marks:
    """The origins, by index, of what lies in each storage."""

    def __init__(self) -> None:
        self._of: dict[int, set[int]] = {}
        self._kept: list[Tensor] = []  # so that their addresses stay theirs

    def of(self, *tensors: Tensor) -> set[int]:
        """Returns the marks of some tensors."""
        return {mark for tensor in tensors for mark in self._of.get(key_of(tensor), ())}

    def add(self, tensor: Tensor, marks: set[int]) -> None:
        """Marks a tensor, and all that shares its memory."""
        self._of.setdefault(key_of(tensor), set()).update(marks)
        self._kept.append(tensor.detach())

"""The weights of one module that were cast to half, each with its float32 values."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import Tensor

from ampatch.steps.weight import Weight


class Shown:
    """Whether a `state_dict` showed values of the models of a call: then their forwards look for edits."""

    def __init__(self) -> None:
        self.any = False


class Float32Values:
    """Knows the weights of a module, by the identity of the half tensor.

    The hooks of the module keep it alive, and with it the tensors: these live as long as the module.
    """

    def __init__(self, notice: Shown | None = None) -> None:
        self.notice = notice or Shown()
        self._weights: dict[int, Weight] = {}

    def __deepcopy__(self, memo: dict) -> Float32Values:
        return Float32Values(copy.deepcopy(self.notice, memo))  # those of a copied model, which has none yet

    def __reduce__(self) -> tuple:
        return Float32Values, (self.notice,)

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._weights

    def __iter__(self) -> Iterator[Weight]:
        return iter(list(self._weights.values()))

    def find(self, tensor: Tensor) -> Weight | None:
        """Returns what is known of a half tensor."""
        return self._weights.get(id(tensor))

    def get(self, tensor: Tensor) -> Weight:
        """Returns what is known of a half tensor, from now on if nothing was."""
        found = self._weights.get(id(tensor))
        if found is None:
            found = self._weights[id(tensor)] = Weight(tensor)
        return found

    def rename(self, tensor: Tensor, successor: Tensor) -> None:
        """Hands the float32 values of a tensor to the one that took its place."""
        weight = self._weights.pop(id(tensor), None)
        precise = None if weight is None else weight.find_precise()
        self._weights[id(successor)] = Weight(successor, precise)

    def forget(self, tensor: Tensor) -> None:
        """Drops what is known of a tensor."""
        self._weights.pop(id(tensor), None)

    def export(self, tensor: Tensor, saved: Tensor) -> Tensor:
        """Returns what a state_dict shows for a half tensor, of which it holds `saved`."""
        weight = self.get(tensor)
        shown = weight.export(saved)
        self.notice.any |= weight.is_shown
        return shown

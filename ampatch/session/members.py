"""The modules and optimizers that calls of `initialize` took; nothing here keeps one of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch.nn import Module

from ampatch.levels.undo import refer
from ampatch.models.cast_tensor import Float32Values, own_tensors
from ampatch.models.hooks import list_tensors
from ampatch.steps.call import Call
from ampatch.steps.foreign_step import find_hooked
from ampatch.steps.masters.weight import Weight
from ampatch.steps.optimizer import AmpOptimizer

Place = tuple[weakref.ref[Module], Callable[[], Float32Values | None]]


class Members:
    """The modules and optimizers of all calls, by weak references.

    An `AmpOptimizer` lives on the hooks of its optimizer's step, float32 values on those of a module's
    `state_dict`. There are no weak references to tensors, which `torch.utils.swap_tensors` refuses.
    """

    def __init__(self) -> None:
        self._modules: list[Place] = []
        self._optimizers: dict[int, weakref.ref[AmpOptimizer]] = {}
        self.float8 = weakref.WeakKeyDictionary[Module, str]()  # of linear layers, why they are not
        self._passive: list[Callable[[], object]] = []  # what calls with enabled=False were given

    def copy(self) -> Members:
        """Returns another one of the same members, without those that are gone."""
        copied = Members()
        copied._modules = [place for place in self._modules if place[0]() is not None]
        copied._optimizers = {key: find for key, find in self._optimizers.items() if find() is not None}
        copied.float8 = self.float8.copy()
        copied._passive = [reference for reference in self._passive if reference() is not None]
        return copied

    def restore(self, others: Members) -> None:
        vars(self).update(vars(others))

    # Modules

    def add_modules(
        self, modules: Iterable[Module], values: dict[int, Float32Values], float8: Mapping[Module, str]
    ) -> None:
        """Adds the parts of models; `values` are those that they own, by the id of the module."""
        self.float8.update(float8)
        self._modules += [(weakref.ref(module), refer(values.get(id(module)))) for module in modules]

    def _live_modules(self) -> Iterator[tuple[Module, Float32Values | None]]:
        for reference, own in self._modules:
            module = reference()
            if module is not None:
                yield module, own()

    def list_tensors(self) -> set[int]:
        """The ids of all tensors of the modules, good for as long as nobody drops one."""
        return {id(tensor) for module, _ in self._live_modules() for _, tensor in own_tensors(module)}

    def map_values(self) -> dict[int, Float32Values]:
        """The float32 values that know the modules' tensors, by the id of the tensor."""
        by_id: dict[int, Float32Values] = {}
        for module, values in self._live_modules():
            for _, tensor in list_tensors(module) if values is not None else ():
                if tensor in values:
                    by_id[id(tensor)] = values
                else:
                    by_id.setdefault(id(tensor), values)
        return by_id

    # Optimizers

    def add_optimizer(self, amp: AmpOptimizer, call: Call) -> None:
        """Adds an optimizer, under the wrapper that was given and the optimizers inside."""
        amp.call = call
        names = [amp.find_given(), *amp.masters.optimizers]
        self._optimizers |= dict.fromkeys(map(id, names), weakref.ref(amp))
        self._passive = [
            reference for reference in self._passive if all(reference() is not one for one in names)
        ]

    def find(self, optimizer: object) -> AmpOptimizer | None:
        """Returns what is kept for an optimizer, or for the one that a trainer has wrapped."""
        find = self._optimizers.get(id(optimizer))
        found = None if find is None else find()
        if found is not None and optimizer is found.optimizer:  # as nearly always
            return found
        found = self._find(optimizer)
        return found or next(filter(None, map(self._find, _look_through(optimizer)[1:])), None)

    def _find(self, optimizer: object) -> AmpOptimizer | None:
        find = self._optimizers.get(id(optimizer))
        amp = None if find is None else find()
        if amp is None:
            return None
        is_it = optimizer is amp.optimizer or optimizer is amp.find_given()  # ids are used again
        return amp if is_it or any(optimizer is one for one in amp.masters.optimizers) else None

    def optimizers(self, *, of_thread: int | None = None) -> list[AmpOptimizer]:
        """What is kept for the optimizers; or for those that a thread uses.

        One that no thread has used yet is any thread's, unless others train: then it may be theirs.
        """
        amps: dict[AmpOptimizer, None] = {}
        others_train = False
        for find in self._optimizers.values():  # torch 2.11 compiles no generator here
            amp = find()
            if amp is not None:
                amps[amp] = None
        if of_thread is None:
            return list(amps)
        for amp in amps:
            others_train |= amp.thread not in (None, of_thread)
        own = (of_thread,) if others_train else (None, of_thread)
        return [amp for amp in amps if amp.thread in own]

    def count(self) -> int:
        return len(self._optimizers)

    def weights(self) -> Iterator[Weight]:
        """The half weights, with masters or without."""
        for amp in self.optimizers():
            yield from amp.masters
        for _, values in self._live_modules():
            yield from values or ()

    # Calls with enabled=False

    def add_passive(self, optimizers: Iterable[object]) -> None:
        self._passive += map(refer, optimizers)

    def is_any_passive(self, optimizers: Sequence[object]) -> bool:
        """Whether one of these passes through."""
        names = [one for optimizer in optimizers for one in _look_through(optimizer)]
        return any(reference() is one for one in names for reference in self._passive)


def _look_through(optimizer: object) -> list[object]:
    """Lists an optimizer and the one inside it; a scheduler has one too, and no groups of parameters."""
    inner = find_hooked(optimizer) if hasattr(optimizer, "param_groups") else None
    return [optimizer] if inner is None else [optimizer, inner]

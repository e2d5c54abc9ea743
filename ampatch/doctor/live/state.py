"""What was there before a step: tensors, plain attributes of modules, and variables of the user's files."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.doctor.instruments.places import LIBRARIES, device_of

PLAIN = (int, float, bool, str, type(None))
OWN = {"training"}
MOST_ENTRIES = 30  # of a dictionary

Space = dict[str, object]
Surroundings = list[tuple[Space, Space]]  # names and their values: where they are kept, and what they were


class Copies:
    """Copies of tensors, in memory that is used again."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._saved: list[Tensor] = []

    @torch.no_grad()
    def take(self, tensors: list[Tensor]) -> None:
        """Copies tensors; no host sync."""
        if list(map(id, tensors)) != list(map(id, self.tensors)):
            self.tensors, self._saved = tensors, [torch.empty_like(each) for each in tensors]
        copy_all(self._saved, tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the tensors be what they were; afterwards they are as they are now."""
        present = [each.detach().clone() for each in self.tensors]
        copy_all(self.tensors, self._saved)
        try:
            yield
        finally:
            copy_all(self.tensors, present)


@torch.no_grad()
def copy_all(to: list[Tensor], tensors: list[Tensor]) -> None:
    """Copies tensors into others at once."""
    if tensors:
        torch._foreach_copy_(to, tensors)


class State:
    """Buffers of a model, and plain attributes of its modules, as they were before a forward."""

    def __init__(self, model: Module) -> None:
        modules = list(model.modules())
        own = [each for each in modules if not type(each).__module__.startswith("torch.")]
        self._modules = [(weakref.ref(each), *plain_names(vars(each))) for each in own]
        self._places = [(weakref.ref(each), name) for each in modules for name in each._buffers]
        self.device = device_of(model)
        self.files = files_of(modules)
        self._buffers = Copies()
        self._values: list[tuple[object, ...]] = []
        plain = [each for each in model.parameters() if type(each) is Parameter and each.numel()]
        self._at_first = [(weakref.ref(each), each.detach().abs().amax()) for each in plain]

    def times_grown(self) -> float:
        """Returns how many times as large as at first the weight is that grew most; waits for the device."""
        known = [(weight, first) for find, first in self._at_first if (weight := find()) is not None]
        times = [float(weight.detach().abs().amax() / first) for weight, first in known]
        return max(filter(math.isfinite, times), default=1.0)

    def save(self) -> None:
        """Takes the state; copies the buffers, no host sync."""
        found = [module._buffers.get(name) for find, name in self._places if (module := find()) is not None]
        self._buffers.take([each for each in found if each is not None])
        self._values = [self._read(index) for index in range(len(self._modules))]

    def _read(self, index: int) -> tuple[object, ...]:
        find, count, names = self._modules[index]
        attributes = vars(find() or self)
        if len(attributes) != count:
            count, names = plain_names(attributes)
            self._modules[index] = find, count, names
        return tuple(map(attributes.get, names))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the model be in this state; afterwards it is as it was."""
        taken = [
            (vars(module), dict(zip(names, values, strict=True)))
            for (find, _, names), values in zip(self._modules, self._values, strict=True)
            if (module := find()) is not None
        ]
        with self._buffers.restored(), restored(taken):
            yield


def plain_names(space: Space) -> tuple[int, tuple[str, ...]]:
    """Returns how many variables there are, and the names of those that are numbers, strings or None."""
    return len(space), tuple(name for name, it in space.items() if type(it) in PLAIN and name not in OWN)


def files_of(modules: Sequence[Module]) -> list[Space]:
    """Returns the global variables of the user's files that the classes of modules stand in."""
    found = {}
    for kind in {type(module) for module in modules}:
        function = getattr(kind.forward, "__wrapped__", kind.forward)
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(LIBRARIES):
            found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def take(spaces: list[Space]) -> Surroundings:
    """Returns plain variables, and small dictionaries of them, as they are now."""
    held = [it for space in spaces for it in space.values() if type(it) is dict and len(it) <= MOST_ENTRIES]
    return [
        (space, {name: it for name, it in space.items() if type(it) in PLAIN}) for space in (*spaces, *held)
    ]


@contextmanager
def restored(taken: Surroundings) -> Iterator[None]:
    """Has variables be what they were; afterwards they are as they are now."""
    now = [(space, dict(space)) for space, _ in taken]
    for space, values in taken:
        space.update(values)
    try:
        yield
    finally:
        for space, values in now:
            for name in space.keys() - values.keys():
                del space[name]
            space.update(values)

"""What one step did, kept so that it can be done again: forwards, operations after them, backward passes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from ampatch.doctor.instruments.places import device_of
from ampatch.doctor.instruments.values import node_of, tensors_in
from ampatch.doctor.live.frames import PLAIN, Frames, Surroundings, files_of


class Slot(NamedTuple):
    """Stands for a tensor that the step itself made, by number."""

    index: int


class Slots:
    """Numbers the tensors that a step makes, and keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}  # and whether it had a graph
        self.count = 0
        self.is_whole = True  # whether every tensor with a graph that an operation took is known
        self.given: list[tuple[Tensor, int]] = []  # what came from outside, and its version

    def find(self, tensor: Tensor) -> int | None:
        """Returns the number of a tensor; it may have got a graph since, of a function that nobody saw."""
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return None
        self.is_whole &= found[2] or node_of(tensor) is None
        return found[1]

    def add(self, value: object) -> tuple[int, ...]:
        """Numbers the tensors in a result."""
        if isinstance(value, Tensor):
            return (self._add(value),)
        return tuple(self._add(tensor) for tensor in tensors_in(value))

    def _add(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        index = known[1] if known is not None and known[0]() is tensor else self.count
        self._known[id(tensor)] = weakref.ref(tensor), index, node_of(tensor) is not None
        self.count += index == self.count
        return index

    def refer(self, value: object) -> object:
        """Returns arguments with slots in the place of tensors that the step made."""
        return map_tensors(value, self._refer) if value else value

    def _refer(self, tensor: Tensor) -> object:
        index = self.find(tensor)
        if index is not None:
            return Slot(index)
        if node_of(tensor) is not None:
            self.is_whole = False
        elif type(tensor) is not Tensor and isinstance(tensor, Parameter):  # asks Python code of torch's
            return tensor
        elif tensor.dim() == 0:
            return tensor.detach().clone()  # a loss scale, say, which is written in place
        elif not tensor.is_inference():
            self.given.append((tensor, tensor._version))
        return tensor


def map_tensors(value: object, change: Callable[[Tensor], object]) -> object:
    """Returns a value with its tensors and slots changed; what is no plain container stays as it is."""
    kind = type(value)
    if kind is Tensor or isinstance(value, (Tensor, Slot)):
        return change(value)
    if kind is dict:
        return {
            key: each if type(each) in PLAIN else map_tensors(each, change) for key, each in value.items()
        }
    if kind in (tuple, list):
        return kind([each if type(each) in PLAIN else map_tensors(each, change) for each in value])
    return value


class Mode(NamedTuple):
    """How operations ran: with or without a graph, and under which `torch.autocast`."""

    grad: bool
    device: str
    autocast: bool
    dtype: torch.dtype | None  # None where autocast is off

    @classmethod
    def now(cls, device: str) -> Mode:
        """Returns how they run here."""
        is_on = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_on else None
        return cls(torch.is_grad_enabled(), device, is_on, dtype)

    @contextmanager
    def entered(self, casts: bool = True) -> Iterator[None]:
        """Has operations run so; without `casts` none is cast."""
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.autocast or torch.is_autocast_enabled(self.device):
                autocast = torch.autocast(self.device, self.dtype, enabled=self.autocast and casts)
                stack.enter_context(autocast)
            yield


@dataclass(slots=True)
class Forward:
    """A call of a model.

    `outputs` are the slots of what it returned, `nodes` where that stands in the graph: slot, number of the
    node, and which of its results it is. `gradients` is what came back, by slot.
    """

    find: Callable[[], Module | None]
    args: object
    kwargs: object
    frames: Frames
    mode: Mode
    random: dict[str, Tensor]
    surroundings: Surroundings
    outputs: tuple[int, ...] = ()
    nodes: list[tuple[int, int, int]] = field(default_factory=list)
    gradients: dict[int, Tensor] = field(default_factory=dict)


class LossOperation(NamedTuple):
    """An operation after a model's forward, such as one of the loss."""

    function: Callable[..., object]
    args: object
    kwargs: object
    outputs: tuple[int, ...]
    frames: Frames
    mode: Mode


class Backward(NamedTuple):
    """A call of `Tensor.backward`; `loss` is a slot, or None for a tensor that nobody saw being made."""

    loss: int | None
    args: object
    kwargs: dict[str, object]
    frames: Frames
    value: Tensor


Event = TypeVar("Event", Forward, LossOperation, Backward)


class Record:
    """The events of one step, and the state that it began in."""

    def __init__(self, spare: dict[int, State] | None = None) -> None:
        self.events: list[Forward | LossOperation | Backward] = []
        self.slots = Slots()
        self.state: dict[int, State] = {}  # by the id of the model
        self.spare = spare or {}  # whose memory may be used again
        self.weights: list[tuple[Tensor, Tensor]] = []  # and their copies, where the step cannot wait
        self.losses: list[Tensor] = []  # the values that backward passes began at

    def of(self, kind: type[Event]) -> list[Event]:
        """Returns the events of a kind."""
        return [event for event in self.events if isinstance(event, kind)]

    def is_changed(self) -> bool:
        """Says whether something that the step took was written to since."""
        return any(tensor._version != version for tensor, version in self.slots.given)


OWN = {"training"}


class State:
    """Buffers of a model, and plain attributes of its modules, as they were before a forward."""

    def __init__(self, model: Module) -> None:
        self._modules = [(weakref.ref(each), *_plain_names(each)) for each in model.modules()]
        self._modules = [known for known in self._modules if not _is_of_torch(known[0]())]
        self._places = [(weakref.ref(each), name) for each in model.modules() for name in each._buffers]
        self.device = device_of(model)
        self.files = files_of(model)
        self._buffers: list[Tensor] = []
        self._saved: list[Tensor] = []
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
        if self._places:
            self._copy_buffers()
        if self._modules:
            self._values = [self._read(index) for index in range(len(self._modules))]

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        found = [module._buffers.get(name) for find, name in self._places if (module := find()) is not None]
        buffers = [each for each in found if each is not None]
        if list(map(id, buffers)) != list(map(id, self._buffers)):
            self._buffers, self._saved = buffers, [torch.empty_like(each) for each in buffers]
        if buffers:
            torch._foreach_copy_(self._saved, buffers)

    def _read(self, index: int) -> tuple[object, ...]:
        find, count, names = self._modules[index]
        attributes = vars(find() or self)
        if len(attributes) != count:
            self._modules[index] = find, *_plain_names(find() or self)
            names = self._modules[index][2]
        return tuple(map(attributes.get, names))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the model be in this state; afterwards it is as it was."""
        with torch.no_grad():
            present = [each.clone() for each in self._buffers]
            values = [dict(vars(find() or self)) for find, *_ in self._modules]
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._saved)
        for (find, _, names), saved in zip(self._modules, self._values, strict=True):
            vars(find() or self).update(zip(names, saved, strict=True))
        try:
            yield
        finally:
            for (find, *_), before in zip(self._modules, values, strict=True):
                module = vars(find() or self)
                module.clear()
                module.update(before)
            with torch.no_grad():
                if self._buffers:
                    torch._foreach_copy_(self._buffers, present)


def _plain_names(module: object) -> tuple[int, tuple[str, ...]]:
    attributes = vars(module)
    names = [name for name, value in attributes.items() if type(value) in PLAIN and name not in OWN]
    return len(attributes), tuple(names)


def _is_of_torch(module: object) -> bool:
    return type(module).__module__.startswith("torch.")

"""What one step did, kept so that it can be done again: forwards, calls after them, backward passes."""

from __future__ import annotations

import functools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from ampatch.doctor.instruments.places import DOCTOR, LIBRARIES, device_of, is_called_by_ampatch
from ampatch.doctor.instruments.values import node_of, tensors_in
from ampatch.levels.private import count_function_modes, function_mode, has_function_modes

PLAIN = (int, float, bool, str, type(None))
MOST_ENTRIES = 30  # of a dictionary
MOST = 30  # frames of libraries between an operation and the user's line
GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
ATTRIBUTE = type(GRAD)
SET = torch.Tensor.__setitem__

Space = dict[str, object]  # variables of a file or attributes of a module, by their names
Variables = list[tuple[Space, Space]]  # where they are, and what they were
Attributes = list[tuple[weakref.ref[Module], Space]]
Frames = tuple[tuple[CodeType, int], ...]  # code and instruction, from the operation to the user's line


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
        slot = self._known.get(id(tensor))
        if slot is None or slot[0]() is not tensor:
            return None
        self.is_whole &= slot[2] or node_of(tensor) is None
        return slot[1]

    def add(self, value: object) -> tuple[int, ...]:
        """Numbers the tensors in a result."""
        return tuple(map(self._add, (value,) if isinstance(value, Tensor) else tensors_in(value)))

    def _add(self, tensor: Tensor) -> int:
        known = self._known.get(id(tensor))
        index = known[1] if known is not None and known[0]() is tensor else self.count
        self._known[id(tensor)] = weakref.ref(tensor), index, node_of(tensor) is not None
        self.count += index == self.count
        return index

    def refer(self, value: object) -> object:
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
    dtype: torch.dtype | None  # None where autocast is off

    @classmethod
    def now(cls, device: str) -> Mode:
        """Returns how they run here."""
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return cls(torch.is_grad_enabled(), device, dtype)

    @contextmanager
    def entered(self, casts: bool = True) -> Iterator[None]:
        """Has operations run so; without `casts` none is cast."""
        is_on, autocast = self.dtype is not None, nullcontext()
        if is_on or torch.is_autocast_enabled(self.device):
            autocast = torch.autocast(self.device, self.dtype, enabled=is_on and casts)
        with torch.set_grad_enabled(self.grad), autocast:
            yield


@dataclass(slots=True)
class RecordedCall:
    """A call of a model, or of a function after it, such as one of the loss; `outputs` are slots."""

    function: Callable[..., object]
    args: object
    kwargs: object
    frames: Frames
    mode: Mode
    outputs: tuple[int, ...] = ()


@dataclass(slots=True)
class Forward(RecordedCall):
    """A call of a model, to which `function` is a weak reference; `random` are the states of generators.

    `variables` are the global ones of the user's files, as they were before it.
    """

    random: dict[str, Tensor] = field(default_factory=dict)
    variables: Variables = field(default_factory=list)


class Backward(NamedTuple):
    """A backward pass from tensors by their slots, None for one that nobody saw being made."""

    roots: list[int | None]
    options: object  # of `torch.autograd.backward`, by their names
    frames: Frames


Event = TypeVar("Event", RecordedCall, Forward, Backward)


class Record:
    """The events of one step, and the state that it began in."""

    def __init__(self) -> None:
        self.events: list[RecordedCall | Backward] = []
        self.slots = Slots()
        self.state: dict[int, tuple[Copies, Attributes]] = {}  # by the id of the model
        self.weights: Copies | None = None  # where the step is made before it is done again
        self.grown = 0.0  # how many times as large as at first weights were
        self.losses: list[Tensor] = []  # the values that backward passes began at

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]


def is_in_place(function: Callable[..., object]) -> bool:
    """Says whether a function writes into its first argument, by its name.

    >>> [is_in_place(each) for each in (torch.Tensor.add_, torch.Tensor.__iadd__, torch.add)]
    [True, True, False]
    """
    name = getattr(function, "__name__", "")
    return function is SET or (name.startswith("__i") if name.startswith("__") else name.endswith("_"))


def needs_graph(args: tuple[object, ...]) -> bool:
    """Says whether one of an operation's tensors has a graph."""
    if args and type(args[0]) is Tensor and args[0].requires_grad:
        return True
    return any(node_of(tensor) is not None for tensor in tensors_in(args))


class CallRecorder(TorchFunctionMode):
    """Writes into `record`, while no mode of the script's is on torch's stack.

    It goes there when a forward ends and leaves before the backward; it does not go on top of a mode of
    the script's, whose end would then take the wrong one away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record: Record | None = None
        self._device = "cpu"
        self._is_on_stack = False

    def start(self, record: Record, device: str) -> bool:
        """Notes what follows; returns whether it can."""
        self.record, self._device = record, device
        if not self._is_on_stack and not has_function_modes():
            self.__enter__()
            self._is_on_stack = True
        return self._is_on_stack

    def stop(self) -> None:
        """Notes no more; leaves the stack, unless a mode of the script's is above it now."""
        self.record = None
        if not self._is_on_stack:
            return
        count = count_function_modes()
        if count and function_mode(count - 1) is self:
            self._is_on_stack = False
            self.__exit__(None, None, None)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        record = self.record
        if record is None:
            return func(*args, **kwargs)
        if type(func) is ATTRIBUTE and (not isinstance(value := func(*args), Tensor) or func == GRAD):
            return value  # a dtype, say
        if is_in_place(func) and args and record.slots.find(args[0]) is None:
            return func(*args, **kwargs)  # into what the script keeps, as a count: not to be done twice
        if not needs_graph(args) and is_called_by_ampatch():
            return func(*args, **kwargs)  # a scaler's own arithmetic
        taken = record.slots.refer(args), record.slots.refer(kwargs)
        result = func(*args, **kwargs)
        outputs = record.slots.add(result)
        if func is SET or outputs:
            record.events.append(RecordedCall(func, *taken, capture(1), Mode.now(self._device), outputs))
        return result


# ---- Where a call stood in the source, and how to make it again from there ----


def capture(depth: int = 2) -> Frames:
    """Returns the frames from the caller's caller to the first of the user's own.

    Their lines are looked up by `line_of` when a step is replayed: that takes longer than all of this.
    """
    frame: FrameType | None = sys._getframe(depth)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < MOST:
        code = frame.f_code
        is_user, is_here = place_of(code.co_filename)
        if not is_here:
            found.append((code, frame.f_lasti))
        if is_user:
            break
        frame = frame.f_back
    return tuple(found)


@functools.lru_cache(maxsize=1000)
def place_of(name: str) -> tuple[bool, bool]:
    return not name.startswith(LIBRARIES), name.startswith(DOCTOR)


def call_at(frames: Frames, run: Callable[[], object]) -> object:
    """Calls a function from these frames: what looks up the stack finds the files and lines they name."""
    for code, instruction in frames:
        at = _code_at(code.co_filename, line_of(code, instruction))
        run = functools.partial(FunctionType(at, {}), run)
    return run()


def line_of(code: CodeType, instruction: int) -> int:
    """Returns the line of an instruction, the first of its function where it has none."""
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    return next(lines, code.co_firstlineno)


@functools.lru_cache(maxsize=1000)
def _code_at(name: str, line: int) -> CodeType:
    return _call.__code__.replace(co_filename=name, co_firstlineno=line)


# fmt: off
def _call(run): return run()
# fmt: on


# ---- What a forward may change ----


class Copies:
    """What tensors hold now."""

    @torch.no_grad()
    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors, self._saved = tensors, [torch.empty_like(tensor) for tensor in tensors]
        copy_all(self._saved, tensors)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Has the tensors be what they were; afterwards they are as they are now."""
        now = Copies(self._tensors)
        copy_all(self._tensors, self._saved)
        try:
            yield
        finally:
            copy_all(self._tensors, now._saved)


@torch.no_grad()
def copy_all(to: list[Tensor], tensors: list[Tensor]) -> None:
    if tensors:
        torch._foreach_copy_(to, tensors)


@contextmanager
def put_back(variables: Variables) -> Iterator[None]:
    """Has variables be what they were; afterwards they are as they are now."""
    now = [(space, dict(space)) for space, _ in variables]
    for space, values in variables:
        space.update(values)
    try:
        yield
    finally:
        for space, values in now:
            for name in space.keys() - values.keys():
                del space[name]
            space.update(values)


def plain_in(space: Space) -> Space:
    return {name: value for name, value in space.items() if type(value) in PLAIN}


def globals_of(modules: Iterable[Module]) -> list[Space]:
    """Returns the global variables of the user's files in which the classes of modules stand."""
    spaces = {}
    for kind in {type(module) for module in modules}:
        function = getattr(kind.forward, "__wrapped__", kind.forward)
        code = getattr(function, "__code__", None)
        if code is not None and not code.co_filename.startswith(LIBRARIES):
            spaces[id(function.__globals__)] = function.__globals__
    return list(spaces.values())


class ModelState:
    """What a forward of a model may change; it keeps no module alive."""

    def __init__(self, model: Module) -> None:
        modules = list(model.modules())
        self.device = device_of(model)
        self._files = globals_of(modules)
        self._own = [
            weakref.ref(module) for module in modules if not type(module).__module__.startswith("torch.")
        ]
        self._owners = [(weakref.ref(module), name) for module in modules for name in module._buffers]
        plain = [
            parameter
            for parameter in model.parameters()
            if type(parameter) is Parameter and parameter.numel()
        ]
        self._at_first = [(weakref.ref(parameter), parameter.detach().abs().amax()) for parameter in plain]

    def times_grown(self) -> float:
        """Returns how many times as large as at first the weight is that grew most; waits for the device."""
        known = [(weight, first) for find, first in self._at_first if (weight := find()) is not None]
        times = [float(weight.detach().abs().amax() / first) for weight, first in known]
        return max(filter(math.isfinite, times), default=1.0)

    def save(self) -> tuple[Copies, Attributes]:
        """Copies buffers, and plain attributes of the user's modules; no host sync."""
        buffers = [owner._buffers.get(name) for find, name in self._owners if (owner := find()) is not None]
        attributes = [(find, plain_in(vars(module))) for find in self._own if (module := find()) is not None]
        return Copies([buffer for buffer in buffers if buffer is not None]), attributes

    def variables(self) -> Variables:
        """Returns plain global variables of the user's files, and small dictionaries of them."""
        values = (value for space in self._files for value in space.values())
        held = [value for value in values if type(value) is dict and len(value) <= MOST_ENTRIES]
        return [(space, plain_in(space)) for space in (*self._files, *held)]

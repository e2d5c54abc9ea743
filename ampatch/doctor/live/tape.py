"""Notes the operations between a model's forward and the backward pass: those of the loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ampatch.doctor.instruments.places import is_called_by_ampatch
from ampatch.doctor.instruments.values import node_of, tensors_in
from ampatch.doctor.live.record import Mode, Operation, Record, capture
from ampatch.levels.private import count_function_modes, function_mode, has_function_modes

GRAD = torch.Tensor.grad.__get__  # type: ignore[attr-defined]
ATTRIBUTE = type(GRAD)
SET = torch.Tensor.__setitem__


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


class Tape(TorchFunctionMode):
    """Writes into `record`, while no mode of the script's is on torch's stack.

    It goes there when a forward ends and leaves before the backward; it does not go on top of a mode of
    the script's, whose end would then take the wrong one away.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record: Record | None = None
        self._device = "cpu"
        self._is_on_stack = False
        self.runs = False  # whether an operation does that is noted

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
        self.runs = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.runs = False
        if func is SET or isinstance(result, Tensor) or any(True for _ in tensors_in(result)):
            mode, outputs = Mode.now(self._device), record.slots.add(result)
            record.events.append(Operation(func, *taken, capture(1), mode, outputs))
        return result

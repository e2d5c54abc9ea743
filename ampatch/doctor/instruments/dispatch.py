"""Writes what a script calls on the tape, and shows it to rules: operations, and functions of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import FunctionType

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ampatch.doctor.instruments.clock import Clock, Instrument
from ampatch.doctor.instruments.places import is_called_by_ampatch, user_line
from ampatch.doctor.instruments.tape import CASTING, RUNNING, Op, Tape, name_of
from ampatch.doctor.instruments.values import Tensors, inexact_in, node_of, quiet
from ampatch.levels.patcher import Patcher

COMPOSITE = ("multi_head_attention_forward",)  # written in Python: it is looked into
LIBRARIES = ("torch.", "ampatch.")  # whose functions stand for operations that were seen


@dataclass
class Operation:
    """A function of torch that is called, with its record; it and what is given are known after it has run.

    `taken` and `given` are the tensors that can hold inf and NaN, what is written in place among both.
    """

    name: str
    func: Callable[..., object] | None
    args: tuple
    kwargs: dict[str, object]
    inputs: Tensors
    is_on: bool  # torch.autocast
    record: Op
    outputs: Tensors = field(default_factory=list)
    casts: Sequence[Op] = ()  # those of ours that are made for it

    @classmethod
    def now(cls, clock: Clock, name: str, func: object, args: tuple, kwargs: dict) -> Operation:
        """Describes what is called at this moment of a run."""
        inputs = inexact_in((args, kwargs))
        device = inputs[0].device.type if inputs else "cpu"
        if is_on := device != "meta" and torch.is_autocast_enabled(device):
            clock.autocasts.add(device)
        record = Op(name, clock.phase, clock.models.place, user_line())
        record.autocast = device if device in clock.autocasts else None
        return cls(name, func, args, kwargs, inputs, is_on, record)

    @property
    def writes(self) -> bool:
        return self.name.endswith("_") or self.name in RUNNING or "out" in self.kwargs

    @property
    def arguments(self) -> tuple[object, ...]:
        return (*self.args, *self.kwargs.values())

    @functools.cached_property
    def floating(self) -> Tensors:
        return [tensor for tensor in self.inputs if tensor.is_floating_point()]

    def gives(self, result: object) -> Tensors:
        """Returns what can hold inf and NaN of a result, and of what it has written into."""
        outputs = inexact_in(result)
        if self.name.endswith("_") and self.args:  # of functions named _foreach_ a list
            outputs += inexact_in(self.args[0])
        if self.name in RUNNING:  # they write into two of what they take
            outputs += [tensor for tensor in inexact_in(self.args[1:5]) if not tensor.requires_grad]
        return list({id(tensor): tensor for tensor in outputs}.values())


class OperationInstrument(Instrument):
    """Looks at what a script calls, by `Operations`."""

    about = ""  # what nobody knows if it fails
    looks_inside = False  # of functions that are `COMPOSITE`
    window: Collection[int] | None = None  # the attempts of interest, None: all

    def __init__(self, tape: Tape) -> None:
        super().__init__(tape.clock)
        self.tape = tape

    def is_due(self, name: str) -> bool:
        """Says whether it looks at an operation: at most attempts of a long script it looks at none."""
        return (self.window is None or self.clock.attempt in self.window) and self.wants(name)

    def wants(self, name: str) -> bool:
        raise NotImplementedError

    def before(self, operation: Operation) -> object:
        """Looks at what an operation takes; returns what `after` needs."""

    def after(self, operation: Operation, kept: object) -> None:
        """Looks at what an operation gives."""

    def see_error(self, operation: Operation, error: Exception) -> None:
        """Looks at an operation that raised an error."""

    def see_function(self, operation: Operation) -> None:
        """Looks at a `torch.autograd.Function` of the script's; operations in its forward are shown too."""


class Operations(TorchFunctionMode):
    """Writes each operation that a script calls and a rule wants on a tape, and shows it to these rules."""

    def __init__(self, tape: Tape, rules: Sequence[OperationInstrument]) -> None:
        super().__init__()
        self._tape, self._clock, self._rules = tape, tape.clock, rules
        self._is_off = False  # torch leaves a mode for what an operation does
        self._casts: list[Op] = []  # of ours, which are part of what follows

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, name_of(func)
        rules, ask = [rule for rule in self._rules if rule.is_due(name)], self._clock.ask
        if not rules:
            return self._call(func, args, kwargs)
        if name in COMPOSITE and any(rule.looks_inside for rule in rules):
            with self:
                return looked_into(func)(*args, **kwargs)
        if not name and not isinstance(value := func(*args, **kwargs), Tensor):
            return value  # a property that is no tensor
        operation = Operation.now(self._clock, name, func, args, kwargs)
        with quiet():
            kept = [ask(rule, rule.before, operation) for rule in rules]
        try:
            result = self._call(func, args, kwargs)
        except RuntimeError as error:
            with quiet():
                self._record(operation, operation.inputs)
                for rule in rules:
                    ask(rule, rule.see_error, operation, error)
            raise
        with quiet():
            self._record(operation, operation.gives(result))
            for rule, each in zip(rules, kept, strict=True):
                ask(rule, rule.after, operation, each)
            if self._clock.failed:
                self._rules = [rule for rule in self._rules if rule not in self._clock.failed]
            self._tape.put(operation.record, operation.outputs)
        return result

    def _record(self, operation: Operation, outputs: Tensors) -> None:
        """Writes an operation on the tape; a cast that ampatch makes is called as what it is made for."""
        record, is_ours = operation.record, is_called_by_ampatch()
        casts = [cast for cast in self._casts if cast.place == record.place] if is_ours else []
        operation.outputs, operation.casts, record.is_ours = outputs, casts, is_ours
        self._tape.add(record, operation.inputs, outputs)
        if not outputs:
            return
        is_cast = is_ours and operation.name in CASTING and record.phase != "optimizer"
        self._casts = [*casts, record] if is_cast else []
        for cast in () if self._casts else casts:
            cast.op = operation.name

    def _call(self, func: Callable[..., object], args: tuple, kwargs: dict) -> object:
        before, self._is_off = self._is_off, True
        try:
            return func(*args, **kwargs)
        finally:
            self._is_off = before

    def follow(self) -> None:
        """Shows operations until the clock is undone, and what torch shows no mode.

        These are functions of `torch.autograd.Function`, with what their backwards call, and what reentrant
        checkpoints repeat.
        """
        reentrant = inspect.unwrap(torch.utils.checkpoint.CheckpointFunction)  # a session puts another there
        self._clock.wrap(reentrant, "forward", self._remember)
        self._clock.wrap(reentrant, "backward", self._repeat)
        self._clock.wrap(BackwardCFunction, "apply", self._go_back)
        held, patcher = vars(Function)["apply"], Patcher()

        def apply(cls: type[Function], *args: object, **kwargs: object) -> object:
            result = held.__get__(None, cls)(*args, **kwargs)
            if not cls.__module__.startswith(LIBRARIES):
                self._show_function(cls.__name__, args, kwargs, inexact_in(result))
            return result

        patcher.put(Function, "apply", classmethod(apply))
        self._clock.undo.callback(patcher.retry)
        self._clock.undo.enter_context(self)

    def _show_function(self, name: str, args: tuple, kwargs: dict, outputs: Tensors) -> None:
        rules = [rule for rule in self._rules if outputs and rule.is_due(name)]
        if not rules:
            return
        operation = Operation.now(self._clock, name, None, args, kwargs)
        for node in {node_of(tensor) for tensor in outputs if isinstance(node_of(tensor), BackwardCFunction)}:
            node.ampatch_function = self._clock.models.save()
        with quiet():
            self._record(operation, outputs)
            for rule in rules:
                self._clock.ask(rule, rule.see_function, operation)

    def _go_back(self, apply: Callable[..., object], node: object, *args: object) -> object:
        """Shows what a backward of the script's own calls, at the place of its function."""
        place = getattr(node, "ampatch_function", None)
        if place is None:
            return apply(node, *args)
        with self._clock.at(place, node), self if self._is_off else nullcontext():
            return apply(node, *args)

    def _remember(self, forward: Callable[..., object], ctx: object, *args: object) -> object:
        ctx.ampatch_place = self._clock.models.save()
        return forward(ctx, *args)

    def _repeat(self, backward: Callable[..., object], ctx: object, *args: object) -> object:
        """Has operations shown that run again inside of a backward pass, at the place of the first time."""
        with self._clock.at(ctx.ampatch_place), self if self._is_off else nullcontext():
            return backward(ctx, *args)


def looked_into(func: FunctionType) -> FunctionType:
    """Returns a function of torch that is written in Python as one that runs its body, and asks no mode."""
    names = {**func.__globals__, "has_torch_function": lambda _: False}
    return FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)

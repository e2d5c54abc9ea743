"""Follows every operation of some steps, forward and backward, and finds those that made bad numbers.

An operation is an origin if what it takes is finite and what it gives is not, or if it makes NaN out of an
infinity that is no fault. What comes of an origin carries its mark, by the memory that it lies in, so that
consequences are told from origins, and what reached the loss or a gradient from what reached nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ampatch.doctor.clock import Listener
from ampatch.doctor.operations import Call, Graph, Origin, is_cured_by_scale, name_of
from ampatch.doctor.places import Models, is_called_by_us, user_line
from ampatch.doctor.values import (
    Damage,
    examine,
    holds_no_number,
    is_finite,
    key_of,
    largest_of,
    plain,
    quiet,
    tensors_in,
)

# Make no values: what they return is uninitialized, or a property, or said by hooks.
IGNORED = ("", "empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "set_")
IGNORED += ("backward", "register_hook", "size")
CASTS = ("to", "half", "bfloat16", "float", "type", "type_as", "_to_copy")


class Enough(BaseException):
    """Ends a script when all that is wanted has been seen."""


class Trace(TorchFunctionMode, Listener):
    """Watches the attempts in `window`; None: all of them."""

    def __init__(self, window: Collection[int] | None) -> None:
        super().__init__()
        self.window = window
        self.origins: list[Origin] = []
        self.attempt = 0
        self.batch_size: int | None = None
        self._models = Models()
        self._steps: Counter[int] = Counter()
        self._optimizers: list[Optimizer] = []  # kept, so that an id stays one optimizer's
        self._begin_window()

    # ---- The parts of a step ----

    def _begin_window(self) -> None:
        self.active = self.window is None or self.attempt in self.window
        self._micro_step = 0
        self._marks: dict[int, set[int]] = {}  # of storages
        self._kept: list[object] = []  # so that their addresses stay theirs
        self._graph = Graph(self._models, self._on_bad_gradient)
        self._part = "input"
        self._pending: Call | None = None
        self._in_backward = False
        self._found_in_backward = False
        self._models.forget_calls()

    def enter_module(self, module: Module, args: tuple, kwargs: dict) -> None:
        """Follows the modules; at the entry of a model looks at its batch."""
        if self._in_backward:
            return
        is_root = self._models.enter(module)
        if is_root:
            self._part = "loss"  # what follows the model
            if self.active:
                with quiet():
                    self._look_at_batch(args)

    def leave_module(self, module: Module) -> None:
        """Follows the modules."""
        if not self._in_backward:
            self._models.leave()

    def _look_at_batch(self, args: tuple) -> None:
        for tensor in tensors_in(args):
            if tensor.dim():
                self.batch_size = tensor.shape[0]
            if not is_finite(tensor) and not self._marks_of(tensor) and torch.isnan(plain(tensor)).any():
                self._add(Call("", "input", self._models.place, user_line()), examine(tensor), [tensor])

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Says which origins reached the loss."""
        self._in_backward, self._found_in_backward = True, False
        if self.active:
            with quiet():
                for loss in losses:
                    if not is_finite(loss):
                        self._reach(self._marks_of(loss))

    def end_backward(self) -> None:
        """Looks at the gradients; the next micro-step begins."""
        self._in_backward = False
        if self.active:
            with quiet():
                self._look_at_gradients()
        self._micro_step += 1
        self._part = "input"
        self._models.forget_calls()

    def _look_at_gradients(self) -> None:
        for parameter in self._models.parameters():
            if parameter.grad is None or is_finite(parameter.grad):
                continue
            if not self._found_in_backward:
                call = Call("accumulate_grad", "backward", None, user_line(), str(parameter.dtype)[6:])
                self._add(call, examine(parameter.grad), [], parameter=self._models.name_of(parameter))
                self._found_in_backward = True
                self.origins[-1].has_reached = True
            self._mark(parameter.grad, {len(self.origins) - 1})

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        """The optimizer's own operations follow."""
        self._part = "optimizer"

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Looks at what the step made of the weights; the next window begins."""
        if self.active:
            with quiet():
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        if not is_finite(parameter):
                            self._reach(self._marks_of(parameter))
        for origin in self.origins:
            if origin.attempt == self.attempt:
                origin.step = self._steps[id(optimizer)]
        self._steps[id(optimizer)] += 1
        self._optimizers.append(optimizer)
        self.attempt += 1
        if self.window is not None and self.attempt > max(self.window):
            raise Enough
        self._begin_window()

    def _reach(self, marks: Collection[int]) -> None:
        for index in marks:
            self.origins[index].has_reached = True

    def to_json(self) -> list[dict[str, object]]:
        """Returns the origins, in the order of their appearance."""
        return [origin.to_json() for origin in self.origins]

    # ---- Operations ----

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not self.active or self._in_backward:
            return func(*args, **kwargs)
        name = name_of(func)
        if name in IGNORED:
            return func(*args, **kwargs)
        taken = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        with quiet():
            bad = [tensor for tensor in taken if not is_finite(tensor)]
            largest = largest_of(taken)
        result = func(*args, **kwargs)
        with quiet():
            given = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
            if name.endswith("_") and taken:
                given.append(taken[0])
            if given:
                self._look(name, args, kwargs, taken, bad, given, largest)
        return result

    def _look(self, name, args, kwargs, taken, bad, given, largest) -> None:
        call = self._call(name, given)
        marks = set().union(*map(self._marks_of, taken)) if taken else set()
        bad_marks = set().union(*map(self._marks_of, bad)) if bad else set()
        self._graph.tag(taken, given, call)
        worst = next((tensor for tensor in given if not is_finite(tensor)), None)
        if worst is None:
            call.origins |= marks
            for tensor in given if marks else ():
                self._mark(tensor, marks)
            return
        damage = examine(worst)
        was_nan = any(torch.isnan(plain(tensor)).any() for tensor in bad)
        if not bad and damage.kind == "inf" and holds_no_number((args, tuple(kwargs.values()))):
            return
        if bad and not bad_marks:
            parameter = next((tensor for tensor in bad if isinstance(tensor, Parameter)), None)
            if parameter is not None or was_nan:
                part = "optimizer" if parameter is not None else "input"
                source = (
                    parameter
                    if parameter is not None
                    else next(t for t in bad if torch.isnan(plain(t)).any())
                )
                self._add(
                    Call("", part, None, call.where),
                    examine(source),
                    [source],
                    parameter=self._models.name_of(source),
                )
                marks = bad_marks = {len(self.origins) - 1}
            elif damage.kind == "inf":
                return  # of a constant
        if not bad_marks:
            self._add(call, damage, [], input_largest=largest)
            marks = marks | {len(self.origins) - 1}
        call.origins |= marks
        for tensor in given:
            self._mark(tensor, marks)

    def _call(self, name: str, given: list[Tensor]) -> Call:
        """Describes an operation; a cast that we make for one is part of it."""
        phase = self._phase()
        dtype = str(given[0].dtype)[6:] if given else ""
        if not is_called_by_us():
            self._pending = None
            return Call(name, phase, self._models.place, user_line(), dtype)
        call = self._pending or Call(name, phase, self._models.place, user_line(), dtype)
        call.op, call.dtype = name, dtype
        self._pending = call if name in CASTS else None
        return call

    def _phase(self) -> str:
        if self._part == "optimizer":
            return "optimizer"
        return "forward" if self._models.is_inside else self._part

    def _add(self, call: Call, damage: Damage, tensors: list[Tensor], **more: object) -> None:
        more |= {"attempt": self.attempt, "batch_size": self.batch_size}
        self.origins.append(Origin(call, call.phase, damage, self._micro_step, **more))
        for tensor in tensors:
            self._mark(tensor, {len(self.origins) - 1})

    # ---- Marks ----

    def _marks_of(self, tensor: Tensor) -> set[int]:
        return self._marks.get(key_of(tensor), set())

    def _mark(self, tensor: Tensor, marks: set[int]) -> None:
        self._marks.setdefault(key_of(tensor), set()).update(marks)
        self._kept.append(tensor.detach())

    def _on_bad_gradient(
        self, call: Call, node: object, parameter: str | None, made: Tensor, taken: tuple
    ) -> None:
        """An operation's own bad numbers come back here; else it is an origin if what it took was finite."""
        if not self.active:
            return
        self._found_in_backward = True
        self._reach(call.origins)
        given = [tensor for tensor in taken if tensor is not None]
        if call.origins or not all(map(is_finite, given)):
            return
        origin = Origin(
            call, "backward", examine(made), self._micro_step, largest_of(given), parameter, node.name()
        )
        origin.attempt, origin.batch_size, origin.has_reached = self.attempt, self.batch_size, True
        origin.is_of_scale = is_cured_by_scale(node, taken)
        self.origins.append(origin)

"""Follows every operation of some steps, forward and backward, and finds those that made bad numbers.

An operation is an origin if what it takes is finite and what it gives is not, or if it makes NaN out of an
infinity that is no fault. What comes of an origin carries its mark, by the memory that it lies in, so that
consequences are told from origins, and what reached the loss or a gradient from what reached nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ampatch.doctor.instruments import operations
from ampatch.doctor.instruments.clock import Listener
from ampatch.doctor.instruments.evidence import Evidence, explain_arguments, note_unfit
from ampatch.doctor.instruments.marks import InfiniteData, Marks, Origins
from ampatch.doctor.instruments.operations import Call, Describer, Enough, Graph, inside_of, name_of
from ampatch.doctor.instruments.places import Models, Standing, is_called_by_scaler, user_line
from ampatch.doctor.instruments.region import region_in_float32
from ampatch.doctor.instruments.values import (
    HALF,
    Tensors,
    examine,
    holds_no_number,
    inexact_in,
    is_finite,
    largest_of,
    plain,
    quiet,
    tensors_in,
)


class Trace(TorchFunctionMode, Listener):
    """Watches the attempts in `window`, None: all; after it the script ends, unless it `goes_on`."""

    def __init__(self, window: Collection[int] | None, goes_on: bool = False) -> None:
        super().__init__()
        self.window, self.goes_on = window, goes_on
        self.origins = Origins()
        self.scale = 1.0  # of the loss
        self.models = Models()
        self._describer = Describer(self.models)
        self._early = Marks()  # of what was made before the first step, and lasts
        self._begin_window()

    def _begin_window(self) -> None:
        self.active = self.window is None or self.origins.attempt in self.window
        self._marks, self._infinite, self._evidence = self._early.copy(), InfiniteData(), Evidence()
        self._graph = Graph(self.models, self._on_bad_gradient)
        self._describer.begin()
        self._in_backward = self._is_off = self._found_in_backward = False
        self.origins.came_back = set()
        self.models.forget_calls()
        self._note_old_gradients()

    def _note_old_gradients(self) -> None:
        """Remembers whose gradients are bad by now: what comes next is not to blame for them."""
        with quiet():
            bad = [p for p in self.models.parameters() if self.active and p.grad is not None]
            self._old = {self.models.name_of(p) for p in bad if not is_finite(p.grad)}

    def enter_module(self, module: Module, args: tuple) -> None:
        """Follows the modules; at the entry of a model looks at its batch."""
        if self._in_backward:
            return
        is_root = self.models.enter(module)
        if is_root or not self.origins.batch_sizes:  # as of a model that is given keywords alone
            with quiet():
                padded = [it for it in args if not isinstance(it, PackedSequence)]
                self.origins.batch_sizes = tuple(it.shape[0] for it in tensors_in(padded) if it.dim())
        if is_root:
            self._describer.part = "loss"  # what follows the model
            if not (self.origins.attempt or self.origins.micro_step):
                self._early = self._marks.copy()
            self.origins.give_up()
            if self.active:
                with quiet():
                    self._look_at_batch(args)
                    for parameter in self.models.parameters():
                        for origin in self.origins.of_input(self._marks.of(parameter)):
                            origin.parameter = self.models.name_of(parameter)

    def see_scale(self, scale: float) -> None:
        """Remembers the scale of the loss."""
        self.scale = scale

    def leave_module(self, module: Module) -> None:
        """Follows the modules."""
        if not self._in_backward:
            self.models.leave()

    def _look_at_batch(self, args: tuple) -> None:
        for tensor in tensors_in(args):
            marks = self._marks.of(tensor)
            self.origins.move_to_forward(marks)
            if is_finite(tensor) or self._infinite.note(tensor, self.models.place, user_line()):
                continue
            for origin in self.origins.of_input(marks):  # made of a part of the batch, shown in all of it
                origin.damage = examine(tensor)
            if not marks:
                call = Call("", "input", self.models.place, user_line())
                self._marks.add(tensor, {self.origins.add(call, examine(tensor))})

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Says which origins reached the loss."""
        self._in_backward, self._found_in_backward, self.origins.asked = True, False, set()
        if self.active:
            self._note_old_gradients()
            if self._describer.part == "input":  # no model has run
                self.origins.move_to_loss()
            with quiet():
                self.origins.reach(self._marks.of(*(loss for loss in losses if not is_finite(loss))))

    def end_backward(self) -> None:
        """Looks at the gradients; the next micro-step begins."""
        self._in_backward = False
        if self.active:
            with quiet():
                self._look_at_gradients(self.models.parameters())
        self.origins.micro_step += 1
        self._describer.part = "input"
        self.models.forget_calls()

    def _look_at_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            gradient, name = parameter.grad, self.models.name_of(parameter)
            is_good = gradient is None or is_finite(gradient)
            if is_good or self.origins.move_to_step(self._marks.of(gradient), name):
                continue
            self.origins.reach(self.origins.came_back)
            is_old = name in self._old and bool(self.origins.all)
            if not (self._found_in_backward or is_old):
                call = Call("accumulate_grad", "backward", None, user_line(), str(parameter.dtype)[6:])
                more = {"parameter": name, "is_of_scale": True}
                self.origins.reach([self.origins.add(call, examine(gradient), **more)])
                self._found_in_backward = True
            self._marks.add(gradient, {self.origins.last})

    @contextmanager
    def again(self, place: Standing) -> Iterator[None]:
        """Operations of a checkpoint run again in the backward pass, at their place, and now have a graph."""
        before = self.models.save()
        self.models.restore(*place)
        self._in_backward, self.origins.is_repeat = False, True
        try:
            with self if self._is_off else nullcontext():
                yield
        finally:
            self._in_backward, self.origins.is_repeat = True, False
            self.models.restore(*before)

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        """The optimizer's own operations follow."""
        self.origins.micro_step = max(0, self.origins.micro_step - 1)  # it belongs to the last backward pass
        self.see_closure(optimizer, False)

    def see_closure(self, optimizer: Optimizer, runs: bool) -> None:
        """Tells what a closure does from what its optimizer does, which takes the gradients."""
        self._describer.part = "input" if runs else "optimizer"
        if self.active and not runs:
            with quiet():
                self.models.learn_masters(optimizer)
                self._look_at_gradients(it for group in optimizer.param_groups for it in group["params"])

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Looks at what the step made of the weights; the next window begins."""
        if self.active:
            with quiet():
                weights = [it for group in optimizer.param_groups for it in group["params"]]
                self.origins.reach(self._marks.of(*(it for it in weights if not is_finite(it))))
        self.origins.end_attempt()
        if self.window is not None and self.origins.attempt > max(self.window) and not self.goes_on:
            raise Enough
        self._begin_window()

    def to_json(self) -> list[dict[str, object]]:
        """Returns the origins, in the order of their appearance."""
        self.origins.give_up()
        return [origin.to_json() for origin in self.origins.all]

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = name_of(func)
        if not self.active or self._in_backward or name in operations.IGNORED:
            before, self._is_off = self._is_off, True  # torch leaves the mode for what a function does
            try:
                return func(*args, **kwargs)
            finally:
                self._is_off = before
        if name in operations.COMPOSITE:
            with inside_of(func), self:
                return func(*args, **kwargs)
        taken = inexact_in((args, kwargs))
        if name in operations.ASKING:
            self.origins.asked |= self._marks.of(*taken)
        with quiet():
            bad = [tensor for tensor in taken if not is_finite(tensor)]
            largest = largest_of(taken)
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if taken:
                call = self._describer.describe(name, taken)
                note_unfit(error, call, taken[0], (args, kwargs), self.origins)
            raise
        device = taken[0].device.type if taken else "cpu"
        self._autocast = device if device != "meta" and torch.is_autocast_enabled(device) else None
        with quiet():
            given = inexact_in(result)
            if name.endswith("_") and args:  # in place; of functions named _foreach_ a list
                given += inexact_in(args[0])
            if given:
                may_mask = not bad and self._describer.part != "optimizer"  # a rate may be infinite
                constant = may_mask and holds_no_number((args, *kwargs.values()))
                call = self._describer.describe(name, given)
                self._evidence.follow(call, args, kwargs, taken, given)
                self._look(call, taken, bad, given, largest, constant)
                for origin in (it for it in self.origins.all if it.call is call):
                    explain_arguments(origin, args, kwargs, taken)
        return result

    def see_function(self, name: str, args: object, result: object) -> None:
        """Learns of a `torch.autograd.Function`, whose node has no operation; those in its forward have."""
        if self.active and not self._in_backward and (given := inexact_in(result)):
            with quiet():
                self._graph.tag(inexact_in(args), given, self._describer.describe(name, given))

    def _look(
        self, call: Call, taken: Tensors, bad: Tensors, given: Tensors, largest: float | None, constant: bool
    ) -> None:
        """Looks at what an operation gives: `bad` are those that it took and that were so before."""
        call.autocast = self._autocast
        self._graph.tag(taken, given, call)
        marks, came = self._marks.of(*taken), self._marks.of(*bad)
        worst = next((tensor for tensor in given if not is_finite(tensor)), None)
        damage = None if worst is None else examine(worst, bool(bad))
        if damage is not None and bad and not came:
            marks = marks | (came := self._marks_of_unseen(call, bad, damage.kind))
        of_mask = damage is not None and damage.kind == "inf" and not came and (constant or bool(bad))
        if damage is not None and not came and not of_mask:
            parameter = self.models.name_of(worst)
            if parameter is None and (call.phase == "optimizer" or call.op in operations.CASTING):
                parameter = self.models.name_beside(worst, given, taken)
            # Only a scaler multiplies a loss by itself, in code of ours or torch's.
            is_scaling = call.phase == "loss" and call.op == "mul" and is_called_by_scaler()
            more = {"input_largest": largest, "parameter": parameter, "is_of_scale": is_scaling}
            is_model = call.place is None or not call.place.module
            more["region"] = region_in_float32(self._autocast, is_model) if damage.dtype in HALF else ()
            marks = {*marks, self.origins.add(call, damage, **more)}
        elif damage is not None and damage.kind == "nan":
            self.origins.note_turn(call, damage, came)
        call.origins |= marks
        call.infinite = examine(bad[0]) if of_mask and bad else None
        call.is_data = self._infinite.is_in(bad) or any(bool((plain(it) == math.inf).any()) for it in bad)
        for tensor in given if marks else ():
            self._marks.add(tensor, marks)
        self._infinite.follow(bad, given)

    def _marks_of_unseen(self, call: Call, bad: list[Tensor], kind: str) -> set[int]:
        """Says where bad numbers come from that no operation made: weights, or NaN and inf in the data."""
        for tensor in bad:
            if isinstance(tensor, Parameter) or torch.isnan(plain(tensor)).any():
                name = self.models.name_of(tensor) or self.models.name_held(tensor)
                is_first = self.window is not None and not self.origins.attempt
                marks = {self.origins.add_unseen(tensor, name, call.where, is_first)}
                self._marks.add(tensor, marks)
                return marks
        return self._infinite.blame(call, bad, self.origins) if kind == "nan" else set()

    def _on_bad_gradient(
        self, call: Call, node: object, parameter: str | None, made: Tensor, taken: tuple
    ) -> None:
        """An operation's own bad numbers come back here; else it is an origin if what it took was finite."""
        if not self.active or (self._found_in_backward and node.name() == operations.REPEATED):
            return
        self._found_in_backward = True
        self.origins.came_back |= call.origins
        given = [tensor for tensor in taken if tensor is not None]
        if call.origins or not all(map(is_finite, given)):
            return
        if call.infinite is not None and call.is_data:  # it was no mask
            data = Call("", "input", call.place, call.where)
            self.origins.came_back.add(self.origins.add(data, call.infinite))
            return
        if call.infinite is not None:
            call.facts["masked"] = True
        more = {"input_largest": largest_of(given), "parameter": parameter, "node": node.name()}
        self.origins.came_back.add(mark := self.origins.add(call, examine(made), **more))
        origin = self.origins.all[mark]
        origin.phase, origin.is_of_scale = "backward", operations.is_cured_by_scale(node, taken, self.scale)

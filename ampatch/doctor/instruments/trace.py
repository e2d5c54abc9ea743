"""Follows every operation of some steps, forward and backward, and finds those that made bad numbers.

An operation is an origin if what it takes is finite and what it gives is not, or if it makes NaN out of an
infinity that is no fault. Its record on the tape names it, and so do those of all that is made of that: so
the trace tells consequences from origins, and knows which origins reached the loss or a gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer

from ampatch.doctor.fixes import Paste
from ampatch.doctor.instruments import places
from ampatch.doctor.instruments import tape as ops
from ampatch.doctor.instruments.clock import MOST_MICRO_STEPS
from ampatch.doctor.instruments.dispatch import Operation, OperationInstrument
from ampatch.doctor.instruments.evidence import (
    Origins,
    explain_arguments,
    follow,
    note_error,
    note_written,
    of_phase,
)
from ampatch.doctor.instruments.region import function_at, is_half_tensor, region_of
from ampatch.doctor.instruments.tape import Op, Origin, Tape
from ampatch.doctor.instruments.values import (
    HALF,
    Kept,
    examine,
    examine_all,
    holds_no_number,
    is_finite,
    largest_of,
    plain,
    quiet,
    tensors_in,
)


class Trace(OperationInstrument):
    """Watches the attempts in `window`, None: all; unless it `goes_on`, it ends after them and `last`."""

    about, looks_inside = "which operation makes inf or NaN", True

    def __init__(
        self,
        tape: Tape,
        window: Collection[int] | None,
        goes_on: bool = False,
        is_brief: bool = False,
        last: int = 0,
    ) -> None:
        super().__init__(tape)
        self.window, self.goes_on, self._last = window, goes_on, max(last, *window or (0,))
        self._most = MOST_MICRO_STEPS if is_brief else math.inf  # backward passes of an attempt
        self.origins, self.models = Origins(self.clock), self.clock.models
        self._begin_window(self.clock.attempt)

    def _begin_window(self, attempt: int) -> None:
        self.active = self.window is None or attempt in self.window
        self._graph = ops.Graph(self.models, self._on_bad_gradient)
        self._found_in_backward = False
        self._inside: defaultdict[object, set[Origin]] = defaultdict(
            set
        )  # origins in backwards, by their nodes
        self.origins.came_back = set()
        self._note_old_gradients()

    def _note_old_gradients(self) -> None:
        """Remembers whose gradients are bad by now: what comes next is not to blame for them."""
        bad = [p for p in self.models.parameters() if self.active and p.grad is not None]
        self._old = {self.models.name_of(p) for p in bad if not is_finite(p.grad)}

    def enter_model(self, model: Module, args: tuple) -> None:
        """Looks at the batch of a model."""
        if self.clock.is_away:
            return
        self._note_batch_sizes(args)
        if not (self.clock.attempt or self.clock.micro_step):
            self.tape.keep()
        self.origins.give_up()
        if self.active:
            with quiet():
                self._look_at_batch(args)
                for parameter in self.models.parameters():
                    for origin in of_phase("input", self.tape.origins_of(parameter)):
                        origin.parameter = self.models.name_of(parameter)
                        if self.clock.attempt:  # a script that copies masters itself, after their step
                            origin.phase = "optimizer"

    def enter_module(self, module: Module, args: tuple) -> None:
        """Learns the sizes of the batch, as of a model that is given keywords alone."""
        if not (self.clock.is_away or self.origins.batch_sizes):
            self._note_batch_sizes(args)

    def _note_batch_sizes(self, args: tuple) -> None:
        with quiet():
            sized = tensors_in([arg for arg in args if not isinstance(arg, PackedSequence)])
            self.origins.batch_sizes = tuple(tensor.shape[0] for tensor in sized if tensor.dim())

    def _look_at_batch(self, args: tuple) -> None:
        for tensor in tensors_in(args):
            origins = self.tape.origins_of(tensor)
            for origin in of_phase("loss", origins):  # it stands between two models
                origin.phase = "forward"
            if is_finite(tensor):
                continue
            for origin in of_phase("input", origins):  # made of a part of the batch, shown in all of it
                if (damage := examine(tensor)).kind == origin.damage.kind:
                    origin.damage = damage
            if not origins:
                origins = self.origins.add_data(tensor, self.models.place, places.user_line())
                self.tape.mark(tensor, origins)
            self.origins.note_taken(origins, "model")

    def begin_backward(self, losses: tuple[Tensor, ...]) -> None:
        """Says which origins reached the loss."""
        self._found_in_backward, self.origins.asked = False, set()
        if self.active:
            self._note_old_gradients()
            if self.clock.part == "input":  # no model has run
                self.origins.move_to_loss()
            self.origins.reach(self.tape.origins_of(*(loss for loss in losses if not is_finite(loss))))

    def end_backward(self) -> None:
        if self.active:
            self._look_at_gradients(self.models.parameters())

    def _look_at_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            gradient, name = parameter.grad, self.models.name_of(parameter)
            is_good = gradient is None or is_finite(gradient)
            if is_good or self.origins.move_to_step(self.tape.origins_of(gradient), name):
                continue
            self.origins.reach(self.origins.came_back)
            is_old = name in self._old and bool(self.origins.all)
            if not (self._found_in_backward or is_old):
                dtype = str(parameter.dtype)[6:]
                call = Op("accumulate_grad", "backward", None, places.user_line(), dtype)
                more = {"parameter": name, "is_of_scale": True}
                self.origins.reach([self.origins.add(call, examine(gradient), **more)])
                self._found_in_backward = True
            self.tape.mark(gradient, {*self.origins.all[-1:]})  # none where nothing was seen

    def begin_attempt(self, optimizer: Optimizer, scaler: object) -> None:
        self.end_closure(optimizer)

    def end_closure(self, optimizer: Optimizer) -> None:
        if self.active:
            self.models.learn_masters(optimizer)
            self._look_at_gradients(places.parameters_of(optimizer))

    def end_attempt(self, optimizer: Optimizer) -> None:
        """Looks at what the step made of the weights; the next window begins."""
        if self.active:
            weights = *places.parameters_of(optimizer), *self.models.parameters()  # masters, and their halves
            lost = [weight for weight in weights if not is_finite(weight)] + self.models.lost_buffers()
            self.origins.reach(self.tape.origins_of(*lost))
        self.origins.end_attempt()
        if self.window is not None and self.clock.attempt >= self._last and not self.goes_on:
            raise ops.Enough
        self._begin_window(self.clock.attempt + 1)

    def found(self) -> list[Origin]:
        """Returns the origins, in the order of their appearance."""
        self.origins.give_up()
        return [
            origin for origin in self.origins.all if origin.has_reached or origin.turns or not origin.is_quiet
        ]

    def wants(self, name: str) -> bool:
        """Of a backward pass the graph tells, but for what the script itself has written."""
        is_away = self.clock.is_away and self.clock.within is None
        return self.clock.micro_step < self._most and not is_away and name not in ops.IGNORED

    def before(self, operation: Operation) -> Kept | None:
        """Returns what is bad before an operation that writes into it, and the largest number."""
        if operation.name in ops.ASKING and operation.record.phase != "input":
            bad = (tensor for tensor in operation.inputs if not is_finite(tensor))
            self.origins.asked |= self.tape.origins_of(*bad)
        return examine_all(operation.inputs) if operation.writes else None

    def after(self, operation: Operation, kept: Kept | None) -> None:
        """Follows what is bad, and what arguments show."""
        if not operation.outputs:
            return
        follow(self.tape, operation)
        self._look(operation.record, operation, kept)
        records = [operation.record, *operation.casts]
        for origin in self.origins.all:
            if any(origin.call is record for record in records):
                explain_arguments(origin, operation, self.models.like_place())

    def see_error(self, operation: Operation, error: Exception) -> None:
        if operation.inputs:
            note_error(error, operation, self.origins, self._region(operation.record, operation))
            operation.record.facts["within"] = self.clock.within is not None

    def see_function(self, operation: Operation) -> None:
        """Learns of a function whose node has no operation."""
        self._graph.tag(operation.inputs, operation.outputs, operation.record)

    def _look(self, call: Op, operation: Operation, kept: Kept | None) -> None:
        """Looks at what an operation gives."""
        inputs, outputs = operation.inputs, operation.outputs
        self._graph.tag(inputs, outputs, call)
        worst = next((tensor for tensor in outputs if not is_finite(tensor)), None)
        if kept is None and (call.origins or worst is not None):
            kept = examine_all(inputs)
        bad, largest = kept or ([], None)
        origins = self.tape.origins_of(*bad)
        if any(word in call.op for word in ops.WEIGHING):
            origins = {origin for origin in origins if not origin.is_quiet}
        if self.clock.within is not None and bad and not origins:
            return  # gradients that were bad before
        damage = None if worst is None else examine(worst, bool(bad))
        # Data that a mask hides.
        if bad and damage is None and not any(tensor.requires_grad for tensor in bad):
            call.origins, call.hidden = self.tape.origins_of(*filter(is_finite, inputs)), origins
        if damage is not None and bad and not origins:
            call.origins |= (origins := self._find_unseen(call, bad))
        is_new = damage is not None and not origins
        is_inf = is_new and damage.kind == "inf" and call.op not in ops.OF_ALL
        # As the fill value of a mask does; a rate may be infinite.
        is_named = is_inf and operation.record.phase != "optimizer" and holds_no_number(operation.arguments)
        of_mask = is_inf and (bool(bad) or is_named)
        if is_new and not of_mask:
            parameter = self.models.name_of(worst)
            if parameter is None and (call.phase == "optimizer" or call.op in ops.CASTING):
                parameter = self.models.name_beside(worst, outputs, inputs)
            # Only a scaler multiplies a loss by itself, in code of ours or torch's.
            is_scaling = call.phase == "loss" and call.op == "mul" and places.is_called_by_scaler()
            more = {"input_largest": largest, "parameter": parameter, "is_of_scale": is_scaling}
            more["region"] = self._region(call, operation)
            call.facts["casts"] = call.op in ops.CASTING
            call.origins.add(new := self.origins.add(call, damage, **more))
            if self.clock.within is not None:
                self._inside[self.clock.within].add(new)
                call.facts["within"] = True
        elif damage is not None and damage.kind == "nan":
            self.origins.note_turn(call, damage, origins)
        call.infinite = examine(bad[0]) if of_mask and bad else None
        call.is_data = any(bool((plain(tensor) == math.inf).any()) for tensor in bad)

    def _region(self, call: Op, of: Operation) -> Paste | None:
        if not any(map(is_half_tensor, of.inputs)):
            before = self.tape.before(call.parents)
            source = next(
                (record for record in before if record.dtype in HALF and record.op not in ops.CASTS), None
            )
            if source and source.place:
                call.facts |= {"alike": [source.place.module], "model": source.place.model}
            return function_at(source and source.where, of.record.autocast)
        return region_of(of, self.models.parameters())

    def _find_unseen(self, call: Op, bad: list[Tensor]) -> set[Origin]:
        """Says where bad numbers come from that no operation made: weights, or NaN and inf in the data."""
        for tensor in bad:
            if isinstance(tensor, Parameter) or torch.isnan(plain(tensor)).any():
                name = self.models.name_of(tensor) or self.models.name_held(tensor)
                is_first = self.window is not None and not self.clock.attempt
                origins = {self.origins.add_unseen(tensor, name, call.where, is_first)}
                self.tape.mark(tensor, origins)
                return origins
        return set()

    def _on_bad_gradient(
        self, call: Op, node: object, parameter: str | None, made: Tensor, grads: tuple
    ) -> None:
        """An operation's own bad numbers come back here; else it is an origin if what it took was finite."""
        if not self.active or (self._found_in_backward and node.name() == ops.REPEATED):
            return
        self._found_in_backward = True
        self.origins.came_back |= call.origins or call.hidden
        if call.origins or call.hidden or not all(map(is_finite, arrived := [*tensors_in(grads)])):
            return
        if inside := self._inside[node]:
            for origin in inside:
                origin.is_of_scale = ops.is_cured_by_scale(node, grads, self.clock.get_scale())
                origin.parameter = parameter
            self.origins.came_back |= inside
            return
        if call.infinite is not None and call.is_data and not note_written(call):  # it was no mask
            data = Op("", "input", call.place, call.where)
            self.origins.came_back.add(self.origins.add(data, call.infinite))
            return
        if call.infinite is not None:
            call.facts |= {"masked": True, "constant": (-math.inf, "-inf", call.dtype)} | call.facts
        takers = (record for record in self.tape.records if call.number in record.parents)
        if call.op in ops.CASTS and (taker := next(takers, call)).op in ops.LOGARITHMS:
            call = taker  # whose gradient is 1 / p: the cast is not to blame
        if call.op not in ops.SUMS:  # of a layer of torch's the line is that which calls it
            like = (
                record for record in self.tape.records if (record.op, record.where) == (call.op, call.where)
            )
            call.facts["alike"] = sorted({record.place.module for record in like if record.place})
        call.facts["function"] = hasattr(node, "saved_tensors")  # one of Python
        more = {"input_largest": largest_of(arrived), "parameter": parameter, "node": node.name()}
        more["is_of_scale"] = ops.is_cured_by_scale(node, grads, self.clock.get_scale())
        self.origins.came_back.add(origin := self.origins.add(call, examine(made), **more))
        origin.phase = "backward"
